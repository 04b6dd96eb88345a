"""What a sweep leaves on disk beside the results of its points."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from ddtree.bench.files import append_line, drop_torn_line, whole_lines
from ddtree.bench.record import SCHEMA, SCHEMA_VERSION, Record, SchemaVersion, schema_text
from ddtree.disk import write_whole
from ddtree.errors import UserError

SWEEP, POINTS = "sweep.json", "points.jsonl"

Status = Literal["measured", "invalid", "failed", "refused", "same"]


class SweepRecord(Record):
    """``sweep.json``: the sweep's file and deployment as they were, and what was to be measured."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    sweep_id: str
    created_at: float
    sweep_text: str
    deployment_text: str
    points: list[str]
    prompts_sha256: dict[str, str]


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

    schema_version: SchemaVersion = SCHEMA_VERSION
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


SWEEP_FILES: dict[str, type[Record]] = {SWEEP: SweepRecord, POINTS: PointRow}


def begin_sweep(folder: Path, record: SweepRecord) -> None:
    """Write down what is to be measured, and the schema of what will come."""
    write_whole(folder / SCHEMA, schema_text(SWEEP_FILES))
    write_whole(folder / SWEEP, record.model_dump_json(indent=2))


def go_on(folder: Path, wanted: SweepRecord) -> SweepRecord:
    """The sweep that was begun in ``folder``, ready to be gone on with.

    Raises:
        UserError: it is another one than ``wanted``.
    """
    path = folder / SWEEP
    try:
        found = SweepRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(f"{path} is not of this version", "use the ddtree that wrote it") from error
    files = {"sweep_text": "sweep file", "deployment_text": "deployment file", "prompts_sha256": "workload or pad text"}
    for name, what in files.items():
        if getattr(found, name) != getattr(wanted, name):
            raise UserError(f"{folder} was begun with another {what}", "give another folder")
    drop_torn_line(folder / POINTS)
    return found


def read_points(folder: Path) -> list[PointRow]:
    """The points that have ended, in that order."""
    path = folder / POINTS
    try:
        return [PointRow.model_validate_json(line) for line in whole_lines(path)]
    except ValidationError as error:
        raise UserError(f"{path} is not of this version", "use the ddtree that wrote it") from error


def counting_variants(run: Path) -> set[str] | None:
    """Of a run's folder, the variants whose numbers count; None: all of them, since it is of no sweep.

    None of a point counts that was invalid, failed, is not done, or was measured again by itself.
    """
    place = run.resolve()
    sweep = next((folder for folder in place.parents if (folder / SWEEP).exists()), None)
    if sweep is None:
        return None
    inside = place.relative_to(sweep).as_posix()
    return {row.variant for row in read_points(sweep) if row.folder == inside and row.status == "measured"}


def append_point(folder: Path, row: PointRow) -> None:
    append_line(folder / POINTS, row.model_dump_json())
