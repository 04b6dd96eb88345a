"""One thing that was looked at, and how it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    """How bad it is."""

    good = "good"
    hint = "hint"
    fault = "fault"
    unknown = "unknown"


@dataclass(frozen=True)
class Condition:
    """Attributes:
    area: `gpu`, `build`, `topology`, `host` or `model`.
    what: what was looked at, as a statement.
    evidence: what was seen.
    remedy: what to do, where the grade is not good.
    """

    area: str
    grade: Grade
    what: str
    evidence: str = ""
    remedy: str = ""


def good(area: str, what: str, evidence: str = "") -> Condition:
    """As it should be."""
    return Condition(area, Grade.good, what, evidence)


def hint(area: str, what: str, evidence: str, remedy: str) -> Condition:
    """It will run, perhaps slower or less safely than it could."""
    return Condition(area, Grade.hint, what, evidence, remedy)


def fault(area: str, what: str, evidence: str, remedy: str) -> Condition:
    """A start would fail, or serve wrongly."""
    return Condition(area, Grade.fault, what, evidence, remedy)


def unknown(area: str, what: str, evidence: str, remedy: str = "") -> Condition:
    """Nothing tells."""
    return Condition(area, Grade.unknown, what, evidence, remedy)
