"""A recording of ``ddtree doctor`` taken on a host that is reached otherwise than by being it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ddtree.deploy.host import Host
from ddtree.doctor.engine_script import ENGINE_SCRIPT
from ddtree.doctor.recording import COMMANDS, FILES, MISSING, Output, Recording
from ddtree.kit.engine_files import Interpreter

_NOT_FOUND = 127
_OF_A_HOST = {"os_release": "/etc/os-release", "cpuinfo": "/proc/cpuinfo", "nccl_conf": "/etc/nccl.conf"}
_VARIABLES = ("NCCL_", "CUDA_", "TORCH_CUDA_", "NVIDIA_VISIBLE_DEVICES")
_NOT_KEPT = ("tcp", "tcp6", "sudo", "user")
"""Of no use to whoever reads a kit, or nobody's business."""
_BOOT_WORDS = ("iommu", "intel_iommu", "amd_iommu", "pci", "hugepage", "transparent_hugepage", "numa", "mitigations")


def record_host(
    host: Host, interpreter: Interpreter | None, environment: Mapping[str, str], disk: str | None = None
) -> Recording:
    """What doctor would record there.

    Args:
        environment: of the process that serves.
        disk: folder whose disk holds the weights.
    """
    outputs = {name: _run(host, *command) for name, command in COMMANDS.items()}
    outputs |= {name: _read(host, path) for name, path in (FILES | _OF_A_HOST).items()}
    outputs["disk"] = _run(host, "df", "-PB1", disk or "/")
    if interpreter is not None:
        outputs["engine"] = _run(host, *interpreter.command(), "-c", ENGINE_SCRIPT, timeout_s=180)
    told = {name: value for name, value in sorted(environment.items()) if name.startswith(_VARIABLES)}
    outputs["environment"] = Output(0, json.dumps(told))
    return Recording(outputs)


def without_private(recording: Recording) -> dict[str, object]:
    """A recording as kits keep it: without open ports and whoever's rights, one processor instead of all."""
    outputs = {name: output for name, output in recording.outputs.items() if name not in _NOT_KEPT}
    if "cpuinfo" in outputs:
        first, _, rest = outputs["cpuinfo"].text.partition("\n\n")
        outputs["cpuinfo"] = Output(outputs["cpuinfo"].code, f"{first}\n\n({rest.count('processor')} more)\n")
    if "cmdline" in outputs:
        words = [word for word in outputs["cmdline"].text.split() if word.startswith(_BOOT_WORDS)]
        outputs["cmdline"] = Output(outputs["cmdline"].code, " ".join(words))
    return Recording(outputs).to_json()


def _run(host: Host, *command: str, timeout_s: float = 30.0) -> Output:
    told = host.run('command -v "$1" >/dev/null || exit 127; LC_ALL=C exec "$@"', *command, timeout_s=timeout_s)
    if told.exit_code == _NOT_FOUND:
        return MISSING
    return Output(told.exit_code, told.stdout if told.exit_code == 0 else told.stdout + told.stderr[-2000:])


def _read(host: Host, path: str) -> Output:
    told = host.run('[ -r "$1" ] && cat -- "$1"', path)
    return Output(0, told.stdout) if told.exit_code == 0 else MISSING
