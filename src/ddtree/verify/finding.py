"""What a probe found out about one claim, and the verdict over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """What is known about a claim."""

    proven = "proven"
    violated = "violated"
    unknown = "unknown"


EXIT_CODES = {Status.proven: 0, Status.violated: 1, Status.unknown: 3}
"""2 is bad input, as everywhere on the command line."""


@dataclass(frozen=True)
class Finding:
    """One claim about a server.

    Attributes:
        probe: the probe that looked, in one word.
        claim: what ought to be so.
        evidence: what was seen, one fact a line.
        remedy: what to do where the claim is not proven.
        is_required: an unknown that is not required does not keep the verdict from being proven: nobody declared it,
            or the engine offers no such evidence.
    """

    probe: str
    status: Status
    claim: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    is_required: bool = True


def proven(probe: str, claim: str, *evidence: str) -> Finding:
    """The evidence shows the claim."""
    return Finding(probe, Status.proven, claim, evidence)


def violated(probe: str, claim: str, *evidence: str, remedy: str) -> Finding:
    """The evidence contradicts the claim."""
    return Finding(probe, Status.violated, claim, evidence, remedy)


def unknown(probe: str, claim: str, *evidence: str, remedy: str = "", is_required: bool = True) -> Finding:
    """There is no evidence either way; never counted as proven."""
    return Finding(probe, Status.unknown, claim, evidence, remedy, is_required)


@dataclass(frozen=True)
class Verdict:
    """All findings of one verification.

    Attributes:
        target: the URL that was verified.
        engine: `native`, `sglang` or `vllm`; None where it was not found out.
        measured: numbers for gauges and baselines: `tau`, `decode_tok_s` and the like.
    """

    target: str
    engine: str | None
    findings: tuple[Finding, ...]
    seconds: float
    is_strict: bool = False
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """Violated where any claim is; unknown where a required one is; else proven."""
        return overall(self.findings, self.is_strict)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for machines."""
        return {
            "target": self.target,
            "engine": self.engine,
            "verdict": self.status.value,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 2),
            "measured": self.measured,
            "findings": [
                {
                    "probe": each.probe,
                    "status": each.status.value,
                    "claim": each.claim,
                    "evidence": list(each.evidence),
                    "remedy": each.remedy,
                    "required": each.is_required,
                }
                for each in self.findings
            ],
        }


def overall(findings: Sequence[Finding], is_strict: bool) -> Status:
    """The verdict; nothing found is nothing proven."""
    if any(each.status is Status.violated for each in findings):
        return Status.violated
    open_claims = [each for each in findings if each.status is Status.unknown and (each.is_required or is_strict)]
    return Status.unknown if open_claims or not findings else Status.proven
