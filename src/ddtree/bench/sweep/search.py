"""Smart search: what was measured so far decides, by optuna, which point is measured next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddtree.bench.numbers import cell_numbers
from ddtree.bench.result_folder import read_requests, read_units
from ddtree.bench.sweep.points import Group, Point, group_of, make_point, marked_same
from ddtree.bench.sweep.store import PointRow
from ddtree.bench.sweep.sweep_file import BenchTable, Range, SearchTable
from ddtree.extras import require_extra

MOST_ERRORS = 0.01
"""A point with a larger share of failed requests is no success."""
_TRIES = 50


@dataclass(frozen=True)
class Search:
    """A block of a sweep whose points are not known before.

    The rows of its points are all that it remembers: from them the next point follows, whether the sweep ran on or was
    cut off and resumed.

    Attributes:
        base: the deployment as it was written.
        folder: of the deployment file.
    """

    name: str
    table: SearchTable
    bench: BenchTable
    base: Mapping[str, Any]
    folder: Path
    per_request: bool

    def __post_init__(self) -> None:
        require_extra("search", f"the search {self.name} of this sweep")
        self.point({key: values[0] if isinstance(values, list) else values.low for key, values in self._keys})

    def point(self, settings: Mapping[str, Any]) -> Point:
        """Raises UserError where a key is none of a deployment's."""
        return make_point(self.name, dict(settings), self.base, self.bench, self.folder)

    def group(self, point: Point) -> Group:
        """What is deployed for a point that runs."""
        return group_of(point, self.base, self.per_request, self.folder)

    def rows(self, rows: Sequence[PointRow]) -> list[PointRow]:
        """Those of this search, in the order in which they ended."""
        return [row for row in rows if row.point.startswith(f"{self.name}: ")]

    def next_point(self, rows: Sequence[PointRow], results: Path) -> Point | None:
        """The point to measure after ``rows``; None where all trials are done, or nothing new is found.

        Args:
            results: folder of the sweep.
        """
        own = self.rows(rows)
        if len(own) >= self.table.trials:
            return None
        told = _told(own, results, self.table.objective)
        known = {row.point for row in own}
        for attempt in range(_TRIES):
            point = self.point(self._ask(told, seed=self.table.seed + len(own) + 10_000 * attempt))
            if point.name not in known:
                return marked_same(point, [self.point(row.settings) for row in own if row.same_as is None])
        return None

    def _ask(self, told: Sequence[tuple[dict[str, Any], float | None]], seed: int) -> dict[str, Any]:
        """Settings that promise most after ``told``: of each point its settings and its value, None where it failed."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        spaces = {key: _space(values) for key, values in self._keys}
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(3, self.table.trials // 4))
        direction: Literal["minimize", "maximize"] = "minimize" if self.table.objective == "ttft_ms" else "maximize"
        study = optuna.create_study(direction=direction, sampler=sampler)
        for settings, value in told:
            state = optuna.trial.TrialState.FAIL if value is None else optuna.trial.TrialState.COMPLETE
            places = {key: _place(values, settings[key]) for key, values in self._keys}
            study.add_trial(optuna.trial.create_trial(params=places, distributions=spaces, value=value, state=state))
        asked = study.ask(spaces).params
        return {key: _value_at(values, asked[key]) for key, values in self._keys}

    @property
    def _keys(self) -> list[tuple[str, list[Any] | Range]]:
        return list(self.table.keys.items())


def _space(values: list[Any] | Range) -> Any:
    """Lists are searched by place: numbers as an order, all else as names."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(values, list):
        is_order = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        return IntDistribution(0, len(values) - 1) if is_order else CategoricalDistribution(range(len(values)))
    if isinstance(values.low, int) and isinstance(values.high, int):
        return IntDistribution(values.low, values.high, log=values.log, step=int(values.step or 1))
    return FloatDistribution(values.low, values.high, log=values.log, step=values.step)


def _value_at(values: list[Any] | Range, place: Any) -> Any:
    """Fractions with six digits at most: 0.3, where three steps of 0.1 come to 0.30000000000000004."""
    if isinstance(values, list):
        return values[place]
    return place if isinstance(place, int) else min(max(float(f"{place:.6g}"), values.low), values.high)


def _place(values: list[Any] | Range, value: Any) -> Any:
    return values.index(value) if isinstance(values, list) else value


def _told(rows: Sequence[PointRow], results: Path, objective: str) -> list[tuple[dict[str, Any], float | None]]:
    """Settings and value of each point; one that is the same as another has its value."""
    values = {row.point: _value(row, results, objective) for row in rows if row.status == "measured"}
    return [(row.settings, values.get(row.same_as or row.point)) for row in rows]


def _value(row: PointRow, results: Path, objective: str) -> float | None:
    """Geometric mean over the cells; None where one has no number or too many errors."""
    place = results / str(row.folder)
    units = [unit for unit in read_units(place) if unit.variant == row.variant]
    cells = cell_numbers(units, [each for each in read_requests(place) if each.variant == row.variant])
    logs = []
    for cell in cells:
        found = getattr(cell.over_whole_units(), objective)
        if found is None or found.value <= 0 or sum(cell.errors.values()) > MOST_ERRORS * cell.requests:
            return None
        logs.append(math.log(found.value))
    return math.exp(sum(logs) / len(logs)) if logs else None
