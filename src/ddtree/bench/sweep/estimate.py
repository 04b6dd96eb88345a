"""How long a sweep will take: counted from its plan, timed by what was measured before where there is something."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddtree.bench.files import folders_with
from ddtree.bench.plan import units_in_order
from ddtree.bench.record import Variant
from ddtree.bench.result_folder import RUN, read_units
from ddtree.bench.sweep.loaded import Sweep, load_of, matrix_of
from ddtree.bench.sweep.points import Group

START_S = 45.0
VERIFY_S = 45.0
TOK_S = {"cpu": 25.0, "cuda": 200.0}


@dataclass(frozen=True)
class Estimate:
    """Of one group. ``by``: what the time of a request was taken from."""

    group: Group
    is_restarted: bool
    units: int
    requests: int
    seconds: float
    by: str


def estimate(sweep: Sweep, folder: Path, tok_s: float | None, done: set[str]) -> list[Estimate]:
    """For each group that still has points to measure.

    A request takes as long as those of this sweep took on average so far; before there are any, as long as
    ``max_tokens`` at ``tok_s`` of one user, with slots sharing it. A start and a verification take what stands above.
    """
    known = _measured_s(folder)
    found: list[Estimate] = []
    deployed: object = None
    for group in sweep.plan.groups:
        if all(point.name in done for point in group.points):
            continue
        load = load_of(group.bench)
        units = units_in_order(matrix_of(group.bench, group.variants or (Variant(),), sweep.folder).cells(), load)
        counts = [load.requests_of(unit.cell.concurrency) for unit in units]
        cells = {unit.cell.name: unit.cell.concurrency for unit in units}
        warm_up = sum(max(load.warm_up_requests, concurrency) for concurrency in cells.values())
        speed = tok_s or TOK_S[group.deployment.runtime.device]
        each_s = known if known is not None else load.max_tokens / speed
        is_restarted = deployed != group.data
        deployed = group.data
        seconds = (sum(counts) + 0.3 * warm_up) * each_s
        if is_restarted:
            seconds += START_S + (VERIFY_S if sweep.file.verify.enabled else 0.0)
        by = "what was measured so far" if known is not None else f"an assumed {speed:g} tok/s"
        found.append(Estimate(group, is_restarted, len(units), sum(counts), seconds, by))
    return found


def _measured_s(folder: Path) -> float | None:
    """Seconds that a request of this sweep took on average, measured over whole units."""
    seconds, requests = 0.0, 0
    for path in folders_with(folder, RUN):
        for unit in read_units(path):
            seconds += unit.duration_s
            requests += unit.requests
    return seconds / requests if requests else None
