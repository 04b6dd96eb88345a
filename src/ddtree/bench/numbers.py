"""What the rows of a cell come to: speeds, latencies, tau and errors, each with its interval."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddtree.bench.record import RequestRow, UnitRow
from ddtree.bench.statistics import Estimate, median_of_groups, quantile, ratio_of_sums, wilson
from ddtree.bench.throughput import decode_tok_s


@dataclass(frozen=True)
class CellKey:
    """A cell of the matrix, as rows name it."""

    workload: str
    context_tokens: int | None
    concurrency: int
    temperature: float
    variant: str

    @classmethod
    def of(cls, row: RequestRow | UnitRow) -> CellKey:
        return cls(row.workload, row.context_tokens, row.concurrency, row.temperature, row.variant)


@dataclass(frozen=True)
class CellNumbers:
    """A cell's numbers. Failed requests are counted and in no other number; None: nothing to make it from.

    Attributes:
        user_tok_s: tokens a second of one answer after its first token, median over answers.
        total_tok_s: tokens a second over all slots, median over repetitions; see ``total_is_steady``.
        total_is_steady: whether every repetition had a steady window, in this cell and in those that it is held
            against; else whole units are compared.
        itl_ms: time from one event with text to the next, median; an event may carry several tokens.
        tau: committed tokens per round, from ``tau_from``: the answers' own accounts or the engine's counters.
        accepted: rounds by the tokens they committed, where the engine tells.
        unit_s: seconds that a repetition took, median.
        raw: per repetition, for comparisons: ``user_tok_s``, ``total_tok_s``, ``whole_tok_s``, ``ttft_ms``.
    """

    key: CellKey
    repetitions: int
    requests: int
    errors: dict[str, int]
    error_share: Estimate | None
    ttft_ms: Estimate | None
    ttft_p95_ms: float | None
    itl_ms: Estimate | None
    user_tok_s: Estimate | None
    total_tok_s: Estimate | None
    total_is_steady: bool
    tau: Estimate | None
    tau_from: str | None
    accepted: dict[int, int]
    completion_tokens: int
    prompt_tokens: Estimate | None
    cached_share: float | None
    client_lag_ms: float
    unit_s: float
    notes: tuple[str, ...]
    raw: dict[str, list[list[float]]] = field(default_factory=dict, compare=False)

    def over_whole_units(self) -> CellNumbers:
        """With totals over whole units, which can be held against those of a cell without steady windows."""
        if not self.total_is_steady:
            return self
        whole = self.raw["whole_tok_s"]
        raw = self.raw | {"total_tok_s": whole}
        return replace(self, total_tok_s=median_of_groups(whole), total_is_steady=False, raw=raw)


def comparable(cells: Sequence[CellNumbers]) -> list[CellNumbers]:
    """The same cells, with totals of one kind among those that differ in their variant alone."""
    unsteady = {_place(cell.key) for cell in cells if not cell.total_is_steady}
    return [cell.over_whole_units() if _place(cell.key) in unsteady else cell for cell in cells]


def cell_numbers(units: Iterable[UnitRow], rows: Iterable[RequestRow]) -> list[CellNumbers]:
    """One entry for each cell, in the order in which cells first appear by name of their axes."""
    units_of: dict[CellKey, list[UnitRow]] = defaultdict(list)
    rows_of: dict[CellKey, list[RequestRow]] = defaultdict(list)
    for unit in units:
        units_of[CellKey.of(unit)].append(unit)
    for row in rows:
        rows_of[CellKey.of(row)].append(row)
    return comparable([_numbers(key, units_of[key], rows_of[key]) for key in sorted(units_of, key=_order)])


def _numbers(key: CellKey, units: Sequence[UnitRow], rows: Sequence[RequestRow]) -> CellNumbers:
    good = [row for row in rows if row.error_kind is None]
    errors = Counter(row.error_kind for row in rows if row.error_kind is not None)
    speeds = _grouped(good, decode_tok_s)
    first = _grouped(good, lambda row: row.ttft_ms)
    gaps = [[gap for row in group for gap in _gaps(row)] for group in _by_repetition(good)]
    is_steady = bool(units) and all(unit.steady_tok_s is not None for unit in units)
    whole = [[unit.whole_tok_s] for unit in units]
    totals = [[unit.steady_tok_s or 0.0] for unit in units] if is_steady else whole
    tau, tau_from = _tau(units, good)
    all_first = [value for group in first for value in group]
    cached = [row for row in good if row.cached_tokens is not None]
    return CellNumbers(
        key=key,
        repetitions=len(units),
        requests=len(rows),
        errors=dict(errors),
        error_share=wilson(errors.total(), len(rows)),
        ttft_ms=median_of_groups(first),
        ttft_p95_ms=quantile(all_first, 0.95),
        itl_ms=median_of_groups(gaps),
        user_tok_s=median_of_groups(speeds),
        total_tok_s=median_of_groups(totals),
        total_is_steady=is_steady,
        tau=tau,
        tau_from=tau_from,
        accepted=dict(sorted(Counter(length for row in good for length in row.accepted_lengths or ()).items())),
        completion_tokens=sum(row.completion_tokens or 0 for row in good),
        prompt_tokens=median_of_groups(_grouped(good, lambda row: row.prompt_tokens)),
        cached_share=sum(row.cached_tokens or 0 for row in cached)
        / max(1, sum(row.prompt_tokens or 0 for row in cached))
        if cached
        else None,
        client_lag_ms=max((unit.client_lag_ms for unit in units), default=0.0),
        unit_s=quantile([unit.duration_s for unit in units], 0.5) or 0.0,
        notes=tuple(dict.fromkeys(note for row in good for note in row.notes)),
        raw={"user_tok_s": speeds, "total_tok_s": totals, "whole_tok_s": whole, "ttft_ms": first},
    )


def _tau(units: Sequence[UnitRow], good: Sequence[RequestRow]) -> tuple[Estimate | None, str | None]:
    """Drawn over prompts: a prompt that comes again, in another repetition too, brings nothing new at temperature 0."""
    told = [row for row in good if row.rounds and row.tau is not None]
    if told:
        is_one_prompt = len({row.prompt_id for row in told}) == 1
        sums: dict[object, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for number, row in enumerate(told):
            of_prompt = sums[number if is_one_prompt else row.prompt_id]
            of_prompt[0] += float(row.tau or 0) * float(row.rounds or 0)
            of_prompt[1] += float(row.rounds or 0)
        tokens, rounds = zip(*sums.values(), strict=True)
        return ratio_of_sums(tokens, rounds), "answers"
    counted = [[unit.metrics_tau] for unit in units if unit.metrics_tau is not None]
    return median_of_groups(counted), "counters" if counted else None


def _by_repetition(rows: Sequence[RequestRow]) -> list[list[RequestRow]]:
    groups: dict[tuple[str, int], list[RequestRow]] = defaultdict(list)
    for row in rows:
        groups[row.run_id, row.repetition].append(row)
    return list(groups.values())


def _grouped(rows: Sequence[RequestRow], value: Any) -> list[list[float]]:
    groups = ([value(row) for row in group] for group in _by_repetition(rows))
    return [[float(item) for item in group if item is not None] for group in groups]


def _gaps(row: RequestRow) -> list[float]:
    return [later - earlier for earlier, later in zip(row.chunk_ms, row.chunk_ms[1:], strict=False)]


def _place(key: CellKey) -> tuple[Any, ...]:
    return key.workload, key.context_tokens, key.concurrency, key.temperature


def _order(key: CellKey) -> tuple[Any, ...]:
    return key.workload, key.context_tokens or 0, key.concurrency, key.temperature, variant_order(key.variant)


def variant_order(name: str) -> tuple[Any, ...]:
    """server, ar, chain, then trees by budget and cap; ``auto`` after the numbers."""
    mode, *rest = name.split(":")
    kinds = ("server", "ar", "chain", "tree")
    numbers = [int(part) if part.isdigit() else 10**6 for part in rest]
    return kinds.index(mode) if mode in kinds else len(kinds), *[*numbers, 0, 0][:2], name
