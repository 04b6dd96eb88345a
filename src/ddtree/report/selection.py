"""Which of the measurements a plot shows, and in what order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddtree.bench.statistics import Estimate
from ddtree.report.configuration import Configuration
from ddtree.report.results import Measurement


def ordered(configurations: Iterable[Configuration]) -> list[Configuration]:
    return sorted(set(configurations), key=lambda each: each.order)


def shortest_context(rows: Sequence[Measurement]) -> int | None:
    return min((each.numbers.key.context_tokens for each in rows), key=lambda context: context or 0, default=None)


def told_length(context: int | None) -> str:
    return "prompts as they are" if context is None else f"{context:,} tokens of context"


def sure(estimate: Estimate | None) -> Estimate:
    """Rows without it were left out before."""
    assert estimate is not None
    return estimate
