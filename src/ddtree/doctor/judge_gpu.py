"""The GPUs themselves: are they there, alike, free, and large enough?"""

from __future__ import annotations

from collections.abc import Iterator

from ddtree.doctor.condition import Condition, fault, good, hint
from ddtree.doctor.gpu_facts import Gpu
from ddtree.doctor.needs import Needs
from ddtree.doctor.recording import Recording

_BUSY_MIB = 2048
_WEIGHT_SHARE = 0.9
"""Share of GPU memory that weights may take at most: caches, graphs and activations need the rest."""


def judge_gpus(recording: Recording, gpus: list[Gpu], needs: Needs) -> Iterator[Condition]:
    """Nothing but a hint where there is no GPU and none is needed."""
    if not gpus:
        yield _none(recording, needs)
        return
    names = sorted({gpu.name for gpu in gpus})
    words = f"{len(gpus)} x {names[0]}, {gpus[0].memory_mib / 1024:.0f} GiB each, driver {gpus[0].driver}"
    if len(names) == 1:
        yield good("gpu", "GPUs are alike", words)
    else:
        yield hint("gpu", "GPUs are alike", ", ".join(names), "choose the alike ones with CUDA_VISIBLE_DEVICES")
    busy = [gpu for gpu in gpus if gpu.used_mib > _BUSY_MIB]
    if busy:
        words = ", ".join(f"GPU {gpu.index}: {gpu.used_mib / 1024:.0f} GiB" for gpu in busy)
        yield hint(
            "gpu", "GPU memory is free", f"in use: {words}", "end what runs there: nvidia-smi names the processes"
        )
    else:
        yield good("gpu", "GPU memory is free")
    if any(gpu.mig for gpu in gpus):
        words = ", ".join(str(gpu.index) for gpu in gpus if gpu.mig)
        yield hint("gpu", "no GPU is cut by MIG", f"MIG is on: {words}", "parallelism over several GPUs needs MIG off")
    narrow = [gpu for gpu in gpus if gpu.width_now and gpu.link_width and gpu.width_now < gpu.link_width]
    if narrow:
        words = ", ".join(f"GPU {gpu.index}: x{gpu.width_now} of x{gpu.link_width}" for gpu in narrow)
        yield hint("gpu", "PCIe slots run at full width", words, "reseat the card, look at slot, riser and BIOS")
    if needs.weights_bytes:
        yield _fit(gpus, needs, needs.weights_bytes)


def _none(recording: Recording, needs: Needs) -> Condition:
    smi = recording["gpus"]
    if smi.code is None:
        words = "there is no nvidia-smi"
    else:
        words = smi.text.strip().splitlines()[-1][:200] if smi.text.strip() else "nvidia-smi lists none"
    if needs.on_gpu:
        return fault("gpu", "there is an NVIDIA GPU", words, "install card and driver, or deploy with device = cpu")
    remedy = "the native engine serves small models on the CPU; SGLang and vLLM need a GPU"
    return hint("gpu", "there is an NVIDIA GPU", words, remedy)


def _fit(gpus: list[Gpu], needs: Needs, weights: int) -> Condition:
    spread = needs.tp or len(gpus)
    what = f"weights of {weights / 1e9:.0f} GB fit {spread} GPUs"
    if spread > len(gpus):
        return fault("model", what, f"there are {len(gpus)} GPUs", f"declare tp = {len(gpus)} or less")
    room = min(gpu.memory_mib for gpu in gpus) * 2**20 * spread
    share = weights / room
    words = f"they take {share:.0%} of {room / 1e9:.0f} GB"
    if share > (needs.memory_fraction or 1.0) or share >= 1:
        return fault("model", what, words, "spread the model over more GPUs, or take a smaller or quantised one")
    if share > _WEIGHT_SHARE:
        remedy = "little is left for the cache: shorten the context, or spread it over more GPUs"
        return hint("model", what, words, remedy)
    return good("model", what, words)
