"""What `/server_info` tells: what was asked for, and what really runs."""

import os
import platform
import secrets
import subprocess
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ddtree
from ddtree.server.service import Service

_BOOT_ID = secrets.token_hex(16)
"""Drawn once a process: whoever sees it change talks to another one."""

_PACKAGES = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn", "pydantic", "numpy", "llguidance")


def server_info(service: Service, requested: dict[str, Any]) -> dict[str, Any]:
    """Facts for people and for probes.

    Args:
        requested: the engine's options as they were given, before defaults were settled.
    """
    engine, beat, readiness = service.thread.engine, service.pulse.look(), service.readiness
    return {
        "model_name": service.settings.model_name,
        "ready": readiness.is_ready,
        "stage": readiness.stage,
        "uptime_s": round(time.time() - service.started, 1),
        "process": {"pid": os.getpid(), "started_unix_s": round(service.started, 3), "boot_id": _BOOT_ID}
        | _invocation(),
        "commit": commit(),
        "versions": versions(),
        "requested": {"engine": requested, "server": service.settings.echo()},
        "effective": {
            "engine": engine.facts() if engine else None,
            "rounds": engine.round_facts() if engine else None,
            "max_batch": engine.max_batch if engine else None,
            "answers_at_most": engine.max_batch + service.settings.max_queue if engine else None,
        },
        "rolling": {"tau": beat.tau, "tok_s": round(beat.tok_s, 2)},
        "occupancy": vars(beat.occupancy) if beat.occupancy else None,
    }


def _invocation() -> dict[str, str]:
    """The name that systemd, or `ddtree deploy`, gave this start, where one of them made it."""
    name = os.environ.get("INVOCATION_ID", "")
    return {"invocation": name} if name else {}


@cache
def versions() -> dict[str, str | None]:
    """Versions of what takes part in an answer."""
    found: dict[str, str | None] = {"ddtree": ddtree.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


@cache
def commit() -> str | None:
    """The commit of the checkout that the package runs from, with a mark where files were changed; else None."""
    folder = Path(ddtree.__file__).parent
    if not (folder.parents[1] / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() or None
