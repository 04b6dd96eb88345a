"""What a run measures, unit by unit, in an order that favours nobody."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ddtree.bench.record import Cell, PlanRecord, Unit, Variant
from ddtree.bench.workload import Workload
from ddtree.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The axes. A context of None takes prompts as they are."""

    workloads: tuple[Workload, ...]
    contexts: tuple[int | None, ...] = (None,)
    concurrencies: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    variants: tuple[Variant, ...] = (Variant(),)

    def cells(self) -> list[Cell]:
        """Every combination."""
        axes = (self.workloads, self.contexts, self.concurrencies, self.temperatures, self.variants)
        for values in axes:
            if not values or len(set(values)) < len(values):
                raise UserError("an axis of the matrix is empty or has a value twice", "name each value once")
        if len({workload.name for workload in self.workloads}) < len(self.workloads):
            raise UserError("two workloads have the same name", "write NAME=FILE to name them")
        return [
            Cell(
                workload=workload.name,
                context_tokens=context,
                concurrency=concurrency,
                temperature=temperature,
                variant=variant,
            )
            for workload, context, concurrency, temperature, variant in product(*axes)
        ]


@dataclass(frozen=True, kw_only=True)
class Load:
    """How each cell is measured.

    Attributes:
        requests: conversations of a unit; None: four a slot, at least 8.
        unique_prefix: begin every prompt with words of its own, so that no prefix cache helps.
    """

    repetitions: int = 3
    requests: int | None = None
    max_tokens: int = 256
    ignore_eos: bool = False
    seed: int = 0
    warm_up_requests: int = 2
    unique_prefix: bool = False
    request_timeout_s: float = 600.0
    stall_timeout_s: float = 60.0
    keep_text: bool = False
    api: str = "chat"

    def requests_of(self, concurrency: int) -> int:
        """Conversations of a unit at ``concurrency``."""
        return self.requests if self.requests is not None else max(8, 4 * concurrency)


def units_in_order(cells: Sequence[Cell], load: Load) -> list[Unit]:
    """All repetitions of all cells: repetition after repetition, each with the cells in another order.

    So whatever drifts on the machine meets every cell alike. The order depends on the seed alone.
    """
    units = []
    for repetition in range(load.repetitions):
        order = list(cells)
        random.Random(f"{load.seed}/{repetition}").shuffle(order)
        units += [Unit(cell=cell, repetition=repetition) for cell in order]
    return units


def plan_record(matrix: Matrix, load: Load, url: str, model: str | None) -> PlanRecord:
    """The plan as it is stored and compared."""
    cells = matrix.cells()
    return PlanRecord(
        base_url=url,
        api=load.api,  # type: ignore[arg-type]  # pydantic checks it
        model=model,
        workloads=[workload.record() for workload in matrix.workloads],
        units=[unit.name for unit in units_in_order(cells, load)],
        repetitions=load.repetitions,
        requests_per_unit={str(c): load.requests_of(c) for c in matrix.concurrencies},
        max_tokens=load.max_tokens,
        ignore_eos=load.ignore_eos,
        seed=load.seed,
        warm_up_requests=load.warm_up_requests,
        unique_prefix=load.unique_prefix,
        request_timeout_s=load.request_timeout_s,
        stall_timeout_s=load.stall_timeout_s,
    )


def parse_variant(text: str) -> Variant:
    """A variant as it is typed: ``server``, ``ar``, ``chain``, ``chain:15``, ``tree``, ``tree:32``, ``tree:32:4``.

    ``auto`` or ``default`` may stand for the budget.
    """
    mode, *rest = text.split(":")
    remedy = "write server, ar, chain[:LENGTH] or tree[:BUDGET[:TOPK]], the budget from 1 to 1024 or auto"
    most = {"server": 0, "ar": 0, "chain": 1, "tree": 2}
    if mode not in most or len(rest) > most[mode]:
        raise UserError(f"{text!r} is no variant", remedy)
    numbers: list[int | str | None] = []
    for place, part in enumerate(rest):
        if part == "auto" and mode == "tree" and place == 0:
            numbers.append("auto")
        elif part == "default" and place == 0 and len(rest) == 2:
            numbers.append(None)
        elif part.isascii() and part.isdigit() and 1 <= int(part[:9]) <= 1024:
            numbers.append(int(part))
        else:
            raise UserError(f"{text!r} is no variant", remedy)
    budget, top_k_cap = (*numbers, None, None)[:2]
    return Variant.model_validate({"mode": mode, "budget": budget, "top_k_cap": top_k_cap})
