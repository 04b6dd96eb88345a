"""GPU architecture, driver, CUDA toolkit, torch, Triton and engine, each against the others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ddtree.doctor.condition import Condition, fault, good, hint, unknown
from ddtree.doctor.gpu_facts import Gpu, Version, dotted, read_driver_cuda, read_nvcc, version
from ddtree.doctor.recording import Recording

_OLDEST_TOOLKIT: dict[Version, Version] = {
    (8, 0): (11, 0),
    (8, 6): (11, 1),
    (8, 9): (11, 8),
    (9, 0): (11, 8),
    (10, 0): (12, 8),
    (10, 3): (12, 9),
    (12, 0): (12, 8),
    (12, 1): (12, 9),
}
"""First CUDA toolkit that can compile for a compute capability."""


def judge_build(recording: Recording, gpus: list[Gpu]) -> Iterator[Condition]:
    """The engine's interpreter must run on these GPUs with this driver."""
    engine = read_engine(recording)
    if engine is None:
        said = recording["engine"].text.strip().splitlines()
        yield fault(
            "build",
            "the engine's interpreter runs",
            said[-1][:200] if said else "it is not there",
            "name it with --python VENV/bin/python",
        )
        return
    packages: dict[str, str] = engine["packages"]
    names = ", ".join(f"{name} {packages[name]}" for name in sorted(packages))
    yield good("build", f"Python {engine['python']} at {engine['executable']}", names or "none of the packages")
    yield from _pins(engine)
    torch = engine.get("torch")
    if torch is None:
        words = engine.get("torch_error") or "it is not installed"
        remedy = "pip install 'ddtree[engine]', or name the engine's interpreter with --python"
        yield (fault if gpus or engine.get("torch_error") else hint)("build", "torch can be imported", words, remedy)
        return
    if not gpus:
        return
    if torch["cuda"] is None:
        yield fault(
            "build",
            "torch is built for CUDA",
            f"torch {packages['torch']} is a CPU build",
            "install torch's CUDA build",
        )
        return
    cuda = version(torch["cuda"])
    yield from _archs(torch["archs"], gpus, packages["torch"])
    yield from _driver(read_driver_cuda(recording), cuda, gpus[0].driver)
    yield from _toolkit(read_nvcc(recording), cuda, gpus)
    if torch["sees_gpus"] != len(gpus):
        yield hint(
            "build",
            "torch sees every GPU",
            f"{torch['sees_gpus']} of {len(gpus)}",
            "look at CUDA_VISIBLE_DEVICES and at permissions of /dev/nvidia*",
        )


def read_engine(recording: Recording) -> dict[str, Any] | None:
    """What the interpreter told; warnings of packages may stand before it."""
    output = recording["engine"]
    for line in reversed(output.text.splitlines() if output.is_good else []):
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict) and isinstance(told.get("packages"), dict):
            return told
    return None


def _pins(engine: dict[str, Any]) -> Iterator[Condition]:
    unmet = engine["unmet"]
    what = "torch, Triton and engine fit each other"
    if unmet is None:
        yield unknown("build", what, "the interpreter cannot compare versions", "pip install packaging there")
    elif unmet:
        words = "; ".join(f"{name} wants {wanted}, installed is {found}" for name, wanted, found in unmet)
        yield fault("build", what, words, "make the engine's environment anew from its own pins")
    elif "torch" in engine["packages"]:
        yield good("build", what, "every pinned version is the installed one")


def _archs(archs: list[str], gpus: list[Gpu], torch: str) -> Iterator[Condition]:
    for capability in sorted({gpu.capability for gpu in gpus}):
        sm = f"sm_{dotted(capability).replace('.', '')}"
        what = f"torch {torch} has kernels for {sm}"
        if fitting := [arch for arch in archs if runs_on(arch, capability)]:
            yield good("build", what, f"by {', '.join(fitting)}")
        else:
            yield fault(
                "build",
                what,
                f"it was built for {', '.join(archs) or 'no architecture that it tells'}: no kernel image for {sm}",
                f"install a torch that was built with CUDA {_words(_OLDEST_TOOLKIT.get(capability))} or newer",
            )


def runs_on(arch: str, capability: Version) -> bool:
    """Whether code for ``arch`` runs: binaries on the same major with the same or a higher minor, PTX on all newer.

    Of letters, ``a`` binds to one architecture exactly, ``f`` to its family.
    """
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if not found:
        return False
    built = (int(found[2]), int(found[3]))
    if found[4] == "a":
        return built == capability
    if found[1] == "compute" and not found[4]:
        return built <= capability
    return built[0] == capability[0] and built <= capability


def _driver(driver: Version | None, cuda: Version, name: str) -> Iterator[Condition]:
    what = f"driver {name} runs CUDA {dotted(cuda)}"
    if driver is None:
        yield unknown("build", what, "nvidia-smi tells no CUDA version")
    elif driver[0] < cuda[0]:
        yield fault("build", what, f"it ends at CUDA {dotted(driver)}", f"install a driver for CUDA {cuda[0]}")
    elif driver < cuda[:2]:
        yield hint(
            "build",
            what,
            f"it ends at CUDA {dotted(driver)}: within a major version that works, but not for kernels from PTX",
            f"install a driver for CUDA {dotted(cuda)}",
        )
    else:
        yield good("build", what, f"it can run up to {dotted(driver)}")


def _toolkit(nvcc: Version | None, cuda: Version, gpus: list[Gpu]) -> Iterator[Condition]:
    what = "the CUDA toolkit can compile kernels at run time"
    if nvcc is None:
        yield hint(
            "build",
            what,
            "there is no nvcc on the path: FlashInfer, DeepGEMM and our own kernels are compiled at the first start",
            f"install the CUDA {dotted(cuda)} toolkit, or ship a cache of compiled kernels",
        )
        return
    needed = max((_OLDEST_TOOLKIT.get(gpu.capability, (0,)) for gpu in gpus), default=(0,))
    newest = max(gpu.capability for gpu in gpus)
    if nvcc < needed:
        sm = dotted(newest).replace(".", "")
        yield fault(
            "build",
            what,
            f"nvcc {dotted(nvcc)} does not know sm_{sm}",
            f"install the CUDA {dotted(needed)} toolkit or newer",
        )
    elif nvcc[0] != cuda[0]:
        yield fault(
            "build",
            what,
            f"nvcc is {dotted(nvcc)}, torch is built with CUDA {dotted(cuda)}",
            f"install the CUDA {dotted(cuda)} toolkit: extensions refuse another major version",
        )
    elif nvcc < cuda[:2]:
        yield hint(
            "build",
            what,
            f"nvcc {dotted(nvcc)} is older than torch's CUDA {dotted(cuda)}",
            f"install the CUDA {dotted(cuda)} toolkit",
        )
    else:
        yield good("build", what, f"nvcc {dotted(nvcc)}, torch's CUDA is {dotted(cuda)}")


def _words(oldest: Version | None) -> str:
    return dotted(oldest) if oldest else "of its time"
