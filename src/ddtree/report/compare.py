"""One result set against another: what became slower, by more than chance and more than is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddtree.bench.statistics import Estimate, ratio_of_medians
from ddtree.errors import UserError
from ddtree.report.recommend import told_place
from ddtree.report.results import Measurement, ResultSet

_BETTER_IS_MORE = {"user_tok_s": True, "total_tok_s": True, "ttft_ms": False}

Judgement = Literal["regression", "worse, within noise", "same", "better", "lost"]


@dataclass(frozen=True)
class Change:
    """A quantity of one cell, new over old. ``ratio`` None: it is missing on one side."""

    configuration: str
    place: str
    quantity: str
    old: float | None
    new: float | None
    ratio: Estimate | None
    judgement: Judgement


def compare(old: ResultSet, new: ResultSet, threshold: float) -> list[Change]:
    """Every quantity of every cell of ``old`` that ``new`` should have too.

    A regression is a median that is worse by more than ``threshold`` (0.05: five per cent) while the 95 % interval of
    the ratio leaves 1 out; worse with an interval that holds 1 is told, and is no regression. A cell that is no longer
    there, or brings no answer any more, is lost; so is one with an error share that rose by more than ``threshold``.

    Raises:
        UserError: a cell was measured with other prompts, or in another way.
    """
    found = {(each.configuration, each.place): each for each in new.measurements}
    changes: list[Change] = []
    for each in old.measurements:
        other = found.get((each.configuration, each.place))
        changes += _changes(each, other, threshold)
    return changes


def is_regression(changes: list[Change]) -> bool:
    """Whether a check should fail."""
    return any(change.judgement in ("regression", "lost") for change in changes)


def _changes(old: Measurement, new: Measurement | None, threshold: float) -> list[Change]:
    name, place = old.configuration.name, told_place(old.place)
    if new is None:
        return [Change(name, place, "all", None, None, None, "lost")]
    if other := [f"{key} {value} (now {new.way[key]})" for key, value in old.way.items() if new.way[key] != value]:
        raise UserError(
            f"the baseline measured {place} with {', '.join(other)}",
            "measure it alike, or compare something else",
        )
    changes = []
    before_numbers, after_numbers = old.numbers, new.numbers
    if not (before_numbers.total_is_steady and after_numbers.total_is_steady):
        before_numbers, after_numbers = before_numbers.over_whole_units(), after_numbers.over_whole_units()
    for quantity, more_is_better in _BETTER_IS_MORE.items():
        before, after = getattr(before_numbers, quantity), getattr(after_numbers, quantity)
        if before is None:
            continue
        if after is None:
            changes.append(Change(name, place, quantity, before.value, None, None, "lost"))
            continue
        ratio = ratio_of_medians(after_numbers.raw[quantity], before_numbers.raw[quantity])
        judgement = "same" if ratio is None else _judge(ratio, more_is_better, threshold)
        changes.append(Change(name, place, quantity, before.value, after.value, ratio, judgement))
    before_errors = old.numbers.error_share.value if old.numbers.error_share else 0.0
    after_errors = new.numbers.error_share.value if new.numbers.error_share else 0.0
    if after_errors > before_errors + threshold:
        changes.append(Change(name, place, "errors", before_errors, after_errors, None, "regression"))
    return changes


def _judge(ratio: Estimate, more_is_better: bool, threshold: float) -> Judgement:
    gain = ratio if more_is_better else Estimate(1 / ratio.value, 1 / ratio.high, 1 / ratio.low, ratio.n)
    if gain.value < 1 - threshold:
        return "regression" if gain.high < 1 else "worse, within noise"
    return "better" if gain.value > 1 + threshold and gain.low > 1 else "same"
