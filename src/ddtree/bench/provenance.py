"""What produces a measurement: program, machine and server, as far as they can be known."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from ddtree.bench.endpoint import Endpoint
from ddtree.bench.record import SessionRecord
from ddtree.errors import UserError
from ddtree.program import commit, versions

PACKAGES = ("aiohttp", "httpx", "numpy", "pydantic", "torch", "transformers", "sglang", "vllm")
_GPU_FIELDS = ("name", "driver_version", "memory.total", "pstate", "clocks.max.sm", "power.limit")


def read_deployment(deployment: Path | None) -> str | None:
    """The text of a deployment file, as it is kept with the results.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return deployment.read_text(encoding="utf-8") if deployment is not None else None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {deployment}", "give --deployment a deployment file") from error


def session_record(run_id: str, endpoint: Endpoint, deployment: Path | None) -> SessionRecord:
    """The facts of this moment. GPUs are those of this machine, which need not be the server's."""
    text = read_deployment(deployment)
    return SessionRecord(
        run_id=run_id,
        started_at=time.time(),
        command=["ddtree", *sys.argv[1:]],
        versions=versions(PACKAGES),
        commit=commit(),
        host=host(),
        gpus=gpus(),
        engine=endpoint.engine,
        server_facts=endpoint.facts,
        deployment_file=deployment.name if deployment else None,
        deployment_sha256=hashlib.sha256(text.encode()).hexdigest() if text is not None else None,
        deployment_text=text,
    )


def host() -> dict[str, Any]:
    """This machine, without its name."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
    }


@cache
def gpus() -> list[dict[str, str]]:
    """NVIDIA GPUs of this machine, empty where it has none."""
    if not shutil.which("nvidia-smi"):
        return []
    told = _output(["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"])
    return [dict(zip(_GPU_FIELDS, line.split(", "), strict=False)) for line in (told or "").splitlines()]


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _output(command: list[str]) -> str | None:
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() or None
