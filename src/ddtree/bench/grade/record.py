"""What grading leaves on disk: ``grade.json``, an answer a line in ``answers.jsonl``, a comparison a line."""

from __future__ import annotations

from typing import Any, Literal

from ddtree.bench.grade.parting import Chance, Parting
from ddtree.bench.record import SCHEMA_VERSION, Record, SchemaVersion, WorkloadRecord


class GradeRecord(Record):
    """``grade.json``: what is graded, and how.

    Attributes:
        sides: names of what is compared, the first is what the others are held against.
        bound_nats: largest gap that counts as a near-tie.
    """

    schema_version: SchemaVersion = SCHEMA_VERSION
    run_id: str
    created_at: float
    command: list[str]
    versions: dict[str, str | None]
    commit: str | None
    workload: WorkloadRecord
    sides: dict[str, dict[str, Any]]
    max_tokens: int
    isolation: str
    bound_nats: float
    note: str | None


class AnswerRow(Record):
    """A graded answer. ``verdict`` ``error``: none came, and it is not part of the score."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    run_id: str
    side: str
    problem_id: str
    verdict: Literal["passed", "failed", "timeout", "error"]
    detail: str
    text: str | None
    finish_reason: str | None
    completion_tokens: int | None
    tau: float | None
    chances: list[Chance] | None


class ComparisonRow(Record):
    """One problem on two sides. ``verdict_changed``: right on one side and wrong on the other."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    run_id: str
    problem_id: str
    side: str
    against: str
    verdicts: tuple[str, str]
    verdict_changed: bool
    parting: Parting


GRADE_FILES: dict[str, type[Record]] = {
    "grade.json": GradeRecord,
    "answers.jsonl": AnswerRow,
    "comparisons.jsonl": ComparisonRow,
}
