"""What a sweep leaves on disk beside the results of its points."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from ddtree.bench.files import append_line, drop_torn_line, whole_lines
from ddtree.bench.record import SCHEMA_VERSION, Record
from ddtree.errors import UserError

SWEEP, POINTS = "sweep.json", "points.jsonl"

Status = Literal["measured", "invalid", "failed", "refused", "same"]


class SweepRecord(Record):
    """``sweep.json``: the sweep's file and deployment as they were, and what was to be measured."""

    schema_version: str = SCHEMA_VERSION
    sweep_id: str
    created_at: float
    sweep_text: str
    deployment_text: str
    points: list[str]
    workloads_sha256: dict[str, str]


class PointRow(Record):
    """How a point ended; written when all of it is on disk.

    Attributes:
        point: its name.
        settings: the keys that were swept, with their values.
        status: ``measured``; ``invalid``: the server was not what the point says, and its numbers do not count;
            ``failed``: it could not be started or measured; ``refused``: the combination does not exist; ``same``: it
            differs from ``same_as`` only in keys without effect.
        folder: of its results or its log, within the sweep's folder.
        variant: how its requests were drafted, where that was set per request.
        verdict: of the verification: ``proven``, ``violated`` or ``unknown``.
    """

    schema_version: str = SCHEMA_VERSION
    sweep_id: str
    point: str
    settings: dict[str, Any]
    status: Status
    reason: str = ""
    same_as: str | None = None
    folder: str | None = None
    variant: str = "server"
    verdict: str | None = None
    log: str | None = None
    finished_at: float
    duration_s: float


def read_points(folder: Path) -> list[PointRow]:
    """The points that have ended, in that order."""
    path = folder / POINTS
    try:
        return [PointRow.model_validate_json(line) for line in whole_lines(path)]
    except ValidationError as error:
        raise UserError(f"{path} is not of this version", "use the ddtree that wrote it") from error


def append_point(folder: Path, row: PointRow) -> None:
    append_line(folder / POINTS, row.model_dump_json())


def recover(folder: Path) -> None:
    """Cut off what a crash left of a line."""
    drop_torn_line(folder / POINTS)
