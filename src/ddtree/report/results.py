"""Result folders, read: what was measured, under what, and what came to nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddtree.bench.files import folders_with
from ddtree.bench.grade.run import RECORD, Grades, read_grades
from ddtree.bench.numbers import CellNumbers, cell_numbers, comparable
from ddtree.bench.record import RunRecord, SessionRecord
from ddtree.bench.result_folder import RUN, read_requests, read_run, read_sessions, read_units
from ddtree.bench.sweep.store import POINTS, PointRow, counting_variants, read_points
from ddtree.errors import UserError
from ddtree.report.configuration import Configuration, configuration_of


@dataclass(frozen=True)
class Measurement:
    """A cell of one run."""

    configuration: Configuration
    numbers: CellNumbers
    run: RunRecord
    engine: str
    is_of_sweep: bool = False

    @property
    def place(self) -> tuple[str, int | None, int, float]:
        """What it shares with the measurements that it can be compared with: all but the configuration."""
        key = self.numbers.key
        return key.workload, key.context_tokens, key.concurrency, key.temperature

    @property
    def way(self) -> dict[str, Any]:
        """What must be the same, beside the place, for two measurements to be held against each other."""
        plan = self.run.plan
        digests = {workload.name: workload.sha256 for workload in plan.workloads}
        prompts = digests.get(self.numbers.key.workload, "unknown")[:8]
        names = ("max_tokens", "ignore_eos", "unique_prefix", "api")
        return {"prompts": prompts} | {name: getattr(plan, name) for name in names}


@dataclass(frozen=True)
class ResultSet:
    """Everything under some folders.

    Attributes:
        unfinished: runs with units that are missing, in words.
        twice: what a sweep measured twice, and which counts.
    """

    measurements: tuple[Measurement, ...]
    runs: tuple[RunRecord, ...]
    sessions: tuple[SessionRecord, ...]
    points: tuple[PointRow, ...]
    grades: tuple[Grades, ...]
    unfinished: tuple[str, ...]
    twice: tuple[str, ...] = ()

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
        UserError: there is none, a file is damaged, or two runs that are of no common sweep have measured the same.
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
        found, graded = folders_with(folder, RUN), folders_with(folder, RECORD)
        if not found and not graded:
            raise UserError(f"{folder} holds no results", "give folders of ddtree bench, sweep or grade")
        points += [point for path in folders_with(folder, POINTS) for point in read_points(path)]
        grades += [read_grades(path) for path in graded]
        for path in found:
            counting = counting_variants(path)
            if counting == set():
                continue
            run, units = read_run(path), read_units(path)
            runs.append(run)
            own = read_sessions(path)
            sessions += own
            if missing := len(run.plan.units) - len(units):
                unfinished.append(f"{run.label}: {missing} of {len(run.plan.units)} units were not measured")
            engine = own[-1].engine if own else "unknown"
            for numbers in cell_numbers(units, read_requests(path)):
                if counting is None or numbers.key.variant in counting:
                    configuration = configuration_of(run, numbers.key.variant)
                    measurements.append(Measurement(configuration, numbers, run, engine, counting is not None))
    measurements = _by_engine(measurements)
    measurements = _told_apart(measurements)
    measurements, twice = _once(measurements)
    measurements = _comparable(measurements)
    order = sorted(
        measurements, key=lambda each: (each.place[0], each.place[1] or 0, each.place[2:], each.configuration.order)
    )
    return ResultSet(
        tuple(order), tuple(runs), tuple(sessions), tuple(points), tuple(grades), tuple(unfinished), tuple(twice)
    )


def _by_engine(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Where there are several engines, each configuration tells its own: a tree of one is not that of another."""
    if len({each.engine for each in measurements}) < 2:
        return list(measurements)
    named = []
    for each in measurements:
        others = dict(each.configuration.others)
        if "engine.kind" not in others:
            others["engine"] = each.engine
        named.append(replace(each, configuration=replace(each.configuration, others=tuple(others.items()))))
    return named


def _told_apart(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Measurements of one place that were made in different ways get places of their own, named for the difference."""
    ways: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for each in measurements:
        ways[each.place].append(each.way)
    apart = []
    for each in measurements:
        others = ways[each.place]
        odd = [f"{name} {value}" for name, value in each.way.items() if any(other[name] != value for other in others)]
        if odd:
            key = replace(each.numbers.key, workload=f"{each.numbers.key.workload} ({', '.join(odd)})")
            each = replace(each, numbers=replace(each.numbers, key=key))
        apart.append(each)
    return apart


def _once(measurements: Sequence[Measurement]) -> tuple[list[Measurement], list[str]]:
    """Of what a sweep measured twice, in blocks that overlap, the one with more repetitions; and what was left out."""
    kept: dict[object, Measurement] = {}
    told = []
    for each in measurements:
        identity = (each.configuration, each.place)
        other = kept.setdefault(identity, each)
        if other is each:
            continue
        if not (each.is_of_sweep and other.is_of_sweep):
            raise UserError(
                f"{other.run.label} and {each.run.label} both measured {each.configuration.name}",
                "give one of them, or compare them with --baseline",
            )
        counts, out = (other, each) if other.numbers.repetitions >= each.numbers.repetitions else (each, other)
        kept[identity] = counts
        told.append(f"{each.configuration.name}: measured twice; {counts.run.label} counts, {out.run.label} does not")
    return list(kept.values()), list(dict.fromkeys(told))


def _comparable(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Total speeds of one kind in each place."""
    cells = comparable([each.numbers for each in measurements])
    return [replace(each, numbers=numbers) for each, numbers in zip(measurements, cells, strict=True)]
