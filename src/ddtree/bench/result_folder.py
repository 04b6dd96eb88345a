"""A run's folder: rows go in as they come, and count once their unit is complete."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ddtree.bench.files import append_line, drop_torn_line, whole_lines
from ddtree.bench.record import RequestRow, RunRecord, SessionRecord, UnitRow
from ddtree.disk import write_whole
from ddtree.errors import UserError

RUN, SESSIONS, REQUESTS, UNITS = "run.json", "sessions.jsonl", "requests.jsonl", "units.jsonl"
RUNNING, INTERRUPTED = "running.jsonl", "interrupted.jsonl"
_WRITE_EVERY_S = 1.0
_Kind = TypeVar("_Kind", bound=BaseModel)


class ResultFolder:
    """Writes one run; one at a time, under :func:`ddtree.bench.files.locked`.

    Rows of the unit that runs go to ``running.jsonl``, at most once a second and with the next row, and to
    ``requests.jsonl`` once the unit is done and its answers are checked. The line in ``units.jsonl`` after that is what
    makes a unit count. Opening the folder moves the rows that ``running.jsonl`` holds of a unit without such a line to
    ``interrupted.jsonl``; the unit is measured again. So a kill at any instant loses at most the unit that was running,
    and doubles none.

    Rows are written by a thread of their own, several at once: neither waiting for the disk nor the thread's own work
    may delay the clock of running requests.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._pending: list[Future[None]] = []
        self._lines: list[str] = []
        self._written_at = 0.0

    def begin(self, run: RunRecord, resume: bool) -> RunRecord:
        """Open for writing; returns the run as it stands on disk.

        Raises:
            UserError: there are results already and ``resume`` is not asked for, or they are of another plan.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / RUN).exists():
            if stray := [name for name in (REQUESTS, UNITS) if (self.folder / name).exists()]:
                raise UserError(f"{self.folder} holds {stray[0]} but no {RUN}", "give an empty folder")
            write_whole(self.folder / RUN, run.model_dump_json(indent=2))
            return run
        found = read_run(self.folder)
        if not resume:
            raise UserError(f"{self.folder} holds results already", "add --resume to go on, or give another folder")
        if found.plan != run.plan:
            raise UserError(f"{self.folder} was measured otherwise: {_difference(found, run)}", "give another folder")
        self._recover()
        return found

    def begin_session(self, session: SessionRecord) -> None:
        append_line(self.folder / SESSIONS, session.model_dump_json())

    def attempts(self) -> dict[str, int]:
        """For each unit that was cut off after some of its rows: how often."""
        path = self.folder / INTERRUPTED
        found: dict[str, int] = {}
        for row in _parse(RequestRow, path, whole_lines(path)):
            found[row.unit] = max(found.get(row.unit, 0), row.attempt)
        return found

    def done(self) -> set[str]:
        """Names of the units that are complete."""
        return {unit.unit for unit in read_units(self.folder)}

    def note(self, row: RequestRow) -> None:
        """Put down a row of the unit that runs; within a second of a write it waits for the next row."""
        self._lines.append(row.model_dump_json())
        if time.monotonic() > self._written_at + _WRITE_EVERY_S:
            self._write_lines()

    def _write_lines(self) -> None:
        if self._lines:
            self._pending.append(self._writer.submit(append_line, self.folder / RUNNING, "\n".join(self._lines)))
            self._lines, self._written_at = [], time.monotonic()

    def requests_bytes(self) -> int:
        path = self.folder / REQUESTS
        return path.stat().st_size if path.exists() else 0

    def commit(self, rows: list[RequestRow], unit: UnitRow) -> UnitRow:
        """Store a unit that is done; returns its line. Afterwards it survives a crash."""
        pending, self._pending = self._pending, []
        self._lines = []  # with all others in what follows
        for write in pending:
            write.result()
        if rows:
            append_line(self.folder / REQUESTS, "\n".join(row.model_dump_json() for row in rows))
        unit = unit.model_copy(update={"requests_end_byte": self.requests_bytes()})
        append_line(self.folder / UNITS, unit.model_dump_json())
        (self.folder / RUNNING).unlink(missing_ok=True)
        return unit

    def __enter__(self) -> ResultFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write_lines()
        self._writer.shutdown(wait=True)

    def _recover(self) -> None:
        for name in (UNITS, SESSIONS, RUNNING, INTERRUPTED):
            drop_torn_line(self.folder / name)
        units = read_units(self.folder)
        committed = units[-1].requests_end_byte if units else 0
        if self.requests_bytes() < committed:
            raise UserError(f"{self.folder / REQUESTS} is shorter than {UNITS} says", "restore it, or measure again")
        if self.requests_bytes() > committed:  # rows of a unit without its line: it is measured again
            with (self.folder / REQUESTS).open("r+b") as file:
                file.truncate(committed)
                os.fsync(file.fileno())
        running = self.folder / RUNNING
        done = {unit.unit for unit in units}
        if cut_off := [row for row in _parse(RequestRow, running, whole_lines(running)) if row.unit not in done]:
            append_line(self.folder / INTERRUPTED, "\n".join(row.model_dump_json() for row in cut_off))
        running.unlink(missing_ok=True)


def read_run(folder: Path) -> RunRecord:
    """``run.json`` of a result folder."""
    path = folder / RUN
    try:
        return RunRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})", "give a result folder") from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is not a run of this version: {_first(error)}", "use the ddtree that wrote it"
        ) from None


def read_units(folder: Path) -> list[UnitRow]:
    """The complete units, in the order in which they were measured.

    Raises:
        UserError: one is there twice.
    """
    units = list(_parse(UnitRow, folder / UNITS, whole_lines(folder / UNITS)))
    if len({unit.unit for unit in units}) < len(units):
        raise UserError(f"{folder / UNITS} holds a unit twice", "restore it, or measure again")
    return units


def read_requests(folder: Path) -> list[RequestRow]:
    """The rows of complete units; by their names, since lines of a copy without secrets have other lengths.

    Raises:
        UserError: a unit has more or fewer rows than its line says.
    """
    path = folder / REQUESTS
    told = {unit.unit: unit.requests for unit in read_units(folder)}
    rows = [row for row in _parse(RequestRow, path, whole_lines(path)) if row.unit in told]
    found = Counter(row.unit for row in rows)
    for name, requests in told.items():
        if found[name] != requests:
            raise UserError(
                f"{path} holds {found[name]} rows of {name}, and {UNITS} says {requests}",
                "restore it, or measure again",
            )
    return rows


def read_sessions(folder: Path) -> list[SessionRecord]:
    """What produced the rows."""
    return list(_parse(SessionRecord, folder / SESSIONS, whole_lines(folder / SESSIONS)))


def _parse(kind: type[_Kind], path: Path, lines: Iterable[str]) -> Iterator[_Kind]:
    for number, line in enumerate(lines, 1):
        try:
            yield kind.model_validate_json(line)
        except ValidationError as error:
            raise UserError(
                f"{path}, line {number} is not of this version: {_first(error)}", "use the ddtree that wrote it"
            ) from None


def _first(error: ValidationError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    fault = error.errors()[0]
    return f"{'.'.join(map(str, fault['loc'])) or 'content'}: {fault['msg']}"


def _difference(found: RunRecord, wanted: RunRecord) -> str:
    """The first field of the plans that differs."""
    old, new = found.plan.model_dump(), wanted.plan.model_dump()
    name = next(name for name in old if old[name] != new[name])
    if name in ("units", "workloads", "requests_per_unit"):
        return f"its {name.replace('_', ' ')} are not the same"
    return f"{name} was {old[name]!r}, now {new[name]!r}"
