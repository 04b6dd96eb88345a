"""Whether a point was what it claims to be, by the accounts that its own answers give."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree.bench.numbers import CellNumbers
from ddtree.bench.record import RequestRow, Variant
from ddtree.deploy import Deployment
from ddtree.verify import Verdict, from_deployment

_MODES = {"none": "ar", "dflash": "chain", "ddtree": "tree"}


def what_is_wrong(
    cells: Sequence[CellNumbers], rows: Sequence[RequestRow], variant: Variant, deployment: Deployment
) -> str:
    """Why a point's numbers do not count; empty where they do.

    Verification has looked at the deployed server before; this looks at what the load met: requests that all failed,
    answers that were drafted in another way, and speculation that brought nothing.
    """
    if not cells:
        return "nothing was measured"
    if fallen := sum(cell.errors.get("not_as_asked", 0) for cell in cells):
        return f"{fallen} requests were not drafted as asked"
    if all(sum(cell.errors.values()) == cell.requests for cell in cells):
        kinds = sorted({kind for cell in cells for kind in cell.errors})
        return f"every request failed ({', '.join(kinds)})"
    mode: str | None = variant.mode
    budget = variant.budget
    if variant.mode == "server":
        mode, budget = _MODES.get(deployment.speculation.algorithm), deployment.speculation.budget
        other = {row.ran_mode for row in rows if row.ran_mode is not None} - {mode}
        if other and mode is not None:
            return f"{deployment.speculation.algorithm} was deployed, and answers were made in mode {min(other)}"
    if mode in ("chain", "tree") and budget != "auto" and budget != 1:  # auto may choose plain decoding
        floor = from_deployment(deployment, "").tau_floor
        low = [cell.tau.value for cell in cells if cell.tau is not None and cell.tau.value < floor]
        if low:
            return f"tau is {min(low):.2f}, below {floor:g}: speculation brings nothing"
    return ""


def violations(verdict: Verdict) -> str:
    """What verification found to be other than declared, in words."""
    found = [finding for finding in verdict.findings if finding.status.value == "violated"]
    return "; ".join(f"{each.claim}: {'; '.join(each.evidence[:2])}" for each in found) or "verification failed"
