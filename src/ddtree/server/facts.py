"""What `/server_info` tells: what was asked for, and what really runs."""

import os
import secrets
import time
from typing import Any

from ddtree.program import commit, versions
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
        "versions": versions(_PACKAGES),
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
