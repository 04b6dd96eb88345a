"""The raw words of a machine: what its commands and files say. Taken here, and judged here or anywhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddtree.disk import write_whole
from ddtree.doctor.engine_script import ENGINE_SCRIPT
from ddtree.errors import UserError

_GPU_FIELDS = (
    "index,name,compute_cap,driver_version,memory.total,memory.used,pcie.link.gen.max,pcie.link.width.max,"
    "pcie.link.width.current,mig.mode.current"
)
COMMANDS: dict[str, list[str]] = {
    "gpus": ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"],
    "smi": ["nvidia-smi"],
    "topology": ["nvidia-smi", "topo", "-m"],
    "nvlink": ["nvidia-smi", "nvlink", "--status"],
    "nvcc": ["nvcc", "--version"],
    "fabricmanager": ["systemctl", "is-active", "nvidia-fabricmanager"],
    "systemd": ["systemctl", "is-system-running"],
    "user": ["id", "-u"],
    "sudo": ["sudo", "-n", "true"],
    "clock": ["timedatectl", "show"],
    "kernel": ["uname", "-sr"],
    "shm": ["df", "-PB1", "/dev/shm"],
}
FILES = {
    "meminfo": "/proc/meminfo",
    "tcp": "/proc/net/tcp",
    "tcp6": "/proc/net/tcp6",
    "limits": "/proc/self/limits",
    "cmdline": "/proc/cmdline",
}
_VARIABLES = ("NCCL_", "CUDA_", "TORCH_CUDA_", "NVIDIA_VISIBLE_DEVICES")
_TIMEOUT_S = 30
_ENGINE_TIMEOUT_S = 180
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Output:
    """Attributes:
    code: exit status; None where the command or file is not there.
    """

    code: int | None
    text: str

    @property
    def is_good(self) -> bool:
        return self.code == 0


MISSING = Output(None, "")


@dataclass(frozen=True)
class Recording:
    """Outputs by name; a name that is not there was not asked for, and counts as missing."""

    outputs: Mapping[str, Output]

    def __getitem__(self, name: str) -> Output:
        return self.outputs.get(name, MISSING)

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {"format": 1, "outputs": {name: vars(output) for name, output in self.outputs.items()}}


def take_recording(python: str | None = None, disk: Path | None = None) -> Recording:
    """Ask this machine.

    Args:
        python: interpreter of the engine; this one if None.
        disk: folder whose disk shall hold the weights.
    """
    outputs = {name: _run(command, _TIMEOUT_S) for name, command in COMMANDS.items()}
    outputs |= {name: _read(Path(path)) for name, path in FILES.items()}
    outputs["engine"] = _run([python or sys.executable, "-c", ENGINE_SCRIPT], _ENGINE_TIMEOUT_S)
    outputs["disk"] = _run(["df", "-PB1", str(_existing(disk or Path.cwd()))], _TIMEOUT_S)
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    outputs["environment"] = Output(0, json.dumps(variables))
    return Recording(outputs)


def read_recording(file: Path) -> Recording:
    """One that was taken elsewhere.

    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise UserError(f"{file} is larger than 16 MiB", "name a file that ddtree doctor --record wrote")
        told = json.loads(file.read_text(encoding="utf-8"))
        if told["format"] != 1:
            raise ValueError("another format")
        outputs = {}
        for name, output in told["outputs"].items():
            code, text = output["code"], output["text"]
            if not (code is None or isinstance(code, int)) or not isinstance(text, str):
                raise ValueError(f"{name} is no output")
            outputs[str(name)] = Output(code, text)
    except OSError as error:
        raise UserError(f"cannot read {file} ({error.strerror})", "give --replay a recording") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{file} is no recording ({type(error).__name__})", "name a file that ddtree doctor --record wrote"
        ) from None
    return Recording(outputs)


def write_recording(file: Path, recording: Recording) -> None:
    """Write it in whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    try:
        write_whole(file, json.dumps(recording.to_json(), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {file} ({error.strerror})", "give --record a file of yours") from None


def _run(command: list[str], timeout_s: float) -> Output:
    environment = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Output(124, f"no answer within {timeout_s:g} s")
    except OSError:
        return MISSING
    return Output(done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr[-2000:])


def _read(path: Path) -> Output:
    try:
        return Output(0, path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return MISSING


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    for each in (folder.absolute(), *folder.absolute().parents):
        if each.exists():
            return each
    return Path("/")
