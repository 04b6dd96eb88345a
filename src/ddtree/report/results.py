"""Result folders, read: what was measured, under what, and what came to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree.bench.files import folders_with
from ddtree.bench.grade.run import RECORD, Grades, read_grades
from ddtree.bench.numbers import CellNumbers, cell_numbers
from ddtree.bench.record import RunRecord, SessionRecord
from ddtree.bench.result_folder import RUN, read_requests, read_run, read_sessions, read_units
from ddtree.bench.sweep.store import POINTS, SWEEP, PointRow, read_points
from ddtree.errors import UserError
from ddtree.report.configuration import Configuration, configuration_of


@dataclass(frozen=True)
class Measurement:
    """A cell of one run."""

    configuration: Configuration
    numbers: CellNumbers
    run: RunRecord

    @property
    def place(self) -> tuple[str, int | None, int, float]:
        """What it shares with the measurements that it can be compared with: all but the configuration."""
        key = self.numbers.key
        return key.workload, key.context_tokens, key.concurrency, key.temperature


@dataclass(frozen=True)
class ResultSet:
    """Everything under some folders."""

    measurements: tuple[Measurement, ...]
    runs: tuple[RunRecord, ...]
    sessions: tuple[SessionRecord, ...]
    points: tuple[PointRow, ...]
    grades: tuple[Grades, ...]
    unfinished: tuple[str, ...]

    @property
    def configurations(self) -> list[Configuration]:
        """In the order in which they are told."""
        return sorted({each.configuration for each in self.measurements}, key=lambda each: each.order)

    @property
    def workloads(self) -> list[str]:
        return sorted({each.numbers.key.workload for each in self.measurements})

    def of(self, workload: str) -> list[Measurement]:
        return [each for each in self.measurements if each.numbers.key.workload == workload]


def read_results(folders: Sequence[Path]) -> ResultSet:
    """Read every run, sweep and grading under ``folders``.

    Raises:
        UserError: there is none, a file is damaged, or two runs have measured the same.
    """
    measurements: list[Measurement] = []
    runs: list[RunRecord] = []
    sessions: list[SessionRecord] = []
    points: list[PointRow] = []
    grades: list[Grades] = []
    unfinished: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}", "give folders of ddtree bench, sweep or grade")
        found = folders_with(folder, RUN)
        graded = folders_with(folder, RECORD)
        if not found and not graded:
            raise UserError(f"{folder} holds no results", "give folders of ddtree bench, sweep or grade")
        sweeps = set(folders_with(folder, SWEEP))
        counting: dict[Path, set[str]] = {}
        for path in folders_with(folder, POINTS):
            points += read_points(path)
            for point in read_points(path):
                if point.folder:
                    variants = counting.setdefault(path / point.folder, set())
                    variants |= {point.variant} if point.status == "measured" else set()
        grades += [read_grades(path) for path in graded]
        for path in found:
            if path not in counting and sweeps & set(path.parents):
                continue  # of points that are not done, or were measured again one by one
            run, units = read_run(path), read_units(path)
            runs.append(run)
            sessions += read_sessions(path)
            if missing := len(run.plan.units) - len(units):
                unfinished.append(f"{run.label}: {missing} of {len(run.plan.units)} units were not measured")
            for numbers in cell_numbers(units, read_requests(path)):
                if path not in counting or numbers.key.variant in counting[path]:
                    configuration = configuration_of(run, numbers.key.variant)
                    measurements.append(Measurement(configuration, numbers, run))
    _refuse_doubles(measurements)
    order = sorted(
        measurements, key=lambda each: (each.place[0], each.place[1] or 0, each.place[2:], each.configuration.order)
    )
    return ResultSet(tuple(order), tuple(runs), tuple(sessions), tuple(points), tuple(grades), tuple(unfinished))


def _refuse_doubles(measurements: Sequence[Measurement]) -> None:
    seen: dict[object, Measurement] = {}
    for each in measurements:
        other = seen.setdefault((each.configuration, each.place), each)
        if other is not each:
            raise UserError(
                f"{other.run.label} and {each.run.label} both measured {each.configuration.name}",
                "give one of them, or compare them with --baseline",
            )
