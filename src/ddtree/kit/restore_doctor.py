"""Doctor before a restore: whether a start would fail here, and what of the machine is another than at sealing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddtree.deploy.apply import Site
from ddtree.doctor import Grade, Needs, Recording, examine
from ddtree.doctor.gpu_facts import read_gpus
from ddtree.doctor.needs import has_experts
from ddtree.doctor.recording import read_recording
from ddtree.errors import UserError
from ddtree.kit.engine_files import Interpreter
from ddtree.kit.host_facts import record_host
from ddtree.kit.restore_weights import WeightsPlan
from ddtree.kit.step import Step

_NEAREST = 'p=$1; while [ ! -e "$p" ]; do p=$(dirname -- "$p"); done; printf "%s" "$p"'


def doctor_steps(
    site: Site,
    folder: Path,
    weights: Sequence[WeightsPlan],
    interpreter: Interpreter | None,
    *,
    builds: bool,
    ignore_faults: bool,
) -> list[Step]:
    """What speaks against a start on the host, and differences to the machine of the kit.

    Args:
        folder: of the kit's place.
        builds: the engine's environment is still to be made, so that faults of it do not count.
        ignore_faults: tell faults without refusing.
    """
    model = site.deployment.model.path
    disk = site.host.run(_NEAREST, model).stdout if model else None
    recording = record_host(site.host, interpreter, {}, disk or "/")
    checkup = examine(recording, _needs(site, folder, weights))
    steps = []
    for each in checkup.conditions:
        if each.grade is Grade.fault and not (each.area == "build" and builds):
            told = f"not so: {each.what} ({each.evidence}): {each.remedy}"
            steps.append(Step("doctor", "unknown" if ignore_faults else "refused", told))
    steps += [Step("doctor", "unknown", f"differs here: {told}") for told in _differences(folder, recording)]
    return steps or [Step("doctor", "done", "nothing speaks against a start, and the machine is of the same kind")]


def _needs(site: Site, folder: Path, weights: Sequence[WeightsPlan]) -> Needs:
    deployment = site.deployment
    missing = sum(each.missing_bytes for each in weights)
    port = deployment.service.port
    is_ours = any(one.is_ours for one in site.supervisor.listeners(port))
    model = folder / "model"
    return Needs(
        weights_bytes=missing or sum(file.size_bytes for plan in weights for file in plan.fetch.files) or None,
        is_fetched=not missing,
        has_experts=has_experts(model) if (model / "config.json").exists() else None,
        on_gpu=deployment.runtime.device == "cuda",
        tp=deployment.parallelism.tp,
        ep=deployment.parallelism.ep,
        nvls=deployment.runtime.nvls,
        port=None if is_ours else port,
        needs_systemd=deployment.service.supervisor == "systemd",
        memory_fraction=deployment.runtime.memory_fraction,
    )


def _differences(folder: Path, here: Recording) -> list[str]:
    try:
        then = read_recording(folder / "env" / "host.json")
    except UserError:
        return ["the kit does not know the machine that it was sealed on"]
    found = []
    for what, (old, new) in {
        "GPUs": (_gpus(then), _gpus(here)),
        "driver": (_driver(then), _driver(here)),
        "kernel": (then["kernel"].text.strip(), here["kernel"].text.strip()),
        "operating system": (_system(then), _system(here)),
        "processor": (_processor(then), _processor(here)),
        "CUDA toolkit": (then["nvcc"].text.strip()[-60:], here["nvcc"].text.strip()[-60:]),
    }.items():
        if old != new:
            found.append(f"{what}: {new or 'none'}, sealed on {old or 'none'}")
    return found


def _gpus(recording: Recording) -> str:
    return ", ".join(gpu.name for gpu in read_gpus(recording))


def _driver(recording: Recording) -> str:
    return next((gpu.driver for gpu in read_gpus(recording)), "")


def _system(recording: Recording) -> str:
    lines = recording["os_release"].text.splitlines()
    return next((line.partition("=")[2].strip('"') for line in lines if line.startswith("PRETTY_NAME=")), "")


def _processor(recording: Recording) -> str:
    lines = recording["cpuinfo"].text.splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
