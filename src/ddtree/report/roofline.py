"""How near a measurement comes to what the memory of its hardware allows."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass

from ddtree.bench.endpoint import is_loopback
from ddtree.bench.record import SessionRecord
from ddtree.bench.told import at
from ddtree.report.results import Measurement, ResultSet

# Bandwidth by data sheet, GB/s; the first name that a GPU's name contains counts.
_BANDWIDTH_GB_S = {
    "H200": 4800.0,
    "B300": 8000.0,
    "B200": 8000.0,
    "H100 PCIe": 2039.0,
    "H100 NVL": 3938.0,
    "H100": 3350.0,
    "A100-SXM4-80GB": 2039.0,
    "A100 80GB PCIe": 1935.0,
    "A100": 1555.0,
    "RTX PRO 6000": 1792.0,
    "RTX 5090": 1792.0,
    "RTX 4090": 1008.0,
    "RTX 3090": 936.0,
    "L40S": 864.0,
    "L4": 300.0,
    "MI300X": 5300.0,
}


@dataclass(frozen=True)
class Machine:
    """What bounds a round at concurrency 1. GB are 10^9 bytes."""

    bandwidth_gb_s: float
    source: str
    target_gb: float
    drafter_gb: float


@dataclass(frozen=True)
class Share:
    """A measurement over its bound."""

    measurement: Measurement
    bound_tok_s: float
    share: float


def known_bandwidth(results: ResultSet) -> tuple[float, str] | None:
    """Of the GPUs that the runs saw, where they are all the same and known, and served what was measured.

    A run sees those of the machine that it measures from.
    """
    if not all(is_loopback(run.plan.base_url) for run in results.runs) or not all(map(_is_here, results.sessions)):
        return None
    names = {gpu.get("name", "") for session in results.sessions for gpu in session.gpus}
    if len(names) != 1:
        return None
    (name,) = names
    found = next((speed for part, speed in _BANDWIDTH_GB_S.items() if part in name), None)
    return None if found is None else (found, f"{name}, data sheet")


def _is_here(session: SessionRecord) -> bool:
    """Whether nothing says that the server was on another machine, or on a CPU."""
    deployed = tomllib.loads(session.deployment_text or "")
    device = at(session.server_facts, "/server_info", "effective", "engine", "device")
    return deployed.get("host", {}).get("kind", "local") == "local" and device != "cpu"


def shares(results: ResultSet, machine: Machine) -> list[Share]:
    """Of every measurement at concurrency 1 with a known tau.

    The bound reads the target's weights once a round, and the drafter's too where there is one; K/V, arithmetic and
    launches are left out, so that no engine can reach it: ``tau * bandwidth / bytes``.
    """
    found = []
    for each in results.measurements:
        numbers = each.numbers
        if numbers.key.concurrency != 1 or numbers.user_tok_s is None:
            continue
        is_plain = each.configuration.mode == "ar"
        tau = 1.0 if is_plain else numbers.tau.value if numbers.tau else None
        if tau is None:
            continue
        gigabytes = machine.target_gb + (0.0 if is_plain else machine.drafter_gb)
        bound = tau * machine.bandwidth_gb_s / gigabytes
        found.append(Share(each, bound, numbers.user_tok_s.value / bound))
    return found
