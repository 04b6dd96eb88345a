"""How far a measurement is, and what it has seen so far: a bar on a terminal, a line a unit elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ddtree.bench.numbers import CellNumbers
from ddtree.bench.record import RequestRow, Unit, UnitRow
from ddtree.bench.run import Watcher
from ddtree.bench.statistics import Estimate
from ddtree.cli.moving_line import MovingLine


class BenchProgress(MovingLine):
    """What a run does; without a terminal a line a unit."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[seen]}", style="dim"),
        )
        self.begin("starting", seen="")
        self._count = self._done = self._rows = self._errors = 0
        self._tokens = 0
        self._since = time.perf_counter()

    def watcher(self) -> Watcher:
        """What a run is to call."""
        return Watcher(
            on_plan=self._plan,
            on_stage=self.say_stage,
            on_unit=self._unit,
            on_row=self._row,
            on_unit_done=self._unit_done,
        )

    def _plan(self, units: Sequence[Unit], done: int) -> None:
        self._count, self._done = len(units), done
        self.move(total=len(units), completed=done)
        if not self.bar and done:
            self.print(f"{done} of {len(units)} units are done already")

    def _unit(self, unit: Unit) -> None:
        self._since, self._tokens = time.perf_counter(), 0
        self.move(description=unit.name)

    def _row(self, row: RequestRow) -> None:
        self._rows += 1
        self._errors += row.error_kind is not None
        self._tokens += row.completion_tokens or 0
        speed = self._tokens / max(1e-9, time.perf_counter() - self._since)
        errors = f", {self._errors} errors" if self._errors else ""
        self.move(seen=f"{speed:.0f} tok/s, {self._rows} requests{errors}")

    def _unit_done(self, unit: UnitRow) -> None:
        self._done += 1
        self.move(completed=self._done)
        if not self.bar:
            errors = f", errors: {unit.errors}" if unit.errors else ""
            self.print(f"[{self._done}/{self._count}] {unit.unit}: {unit.whole_tok_s:.1f} tok/s{errors}")


def numbers_table(cells: Sequence[CellNumbers]) -> Table:
    """The cells with their medians and intervals."""
    unsteady = any(not cell.total_is_steady for cell in cells)
    caption = "* over whole repetitions: not each of them had a steady window" if unsteady else None
    table = Table(box=None, pad_edge=False, header_style="bold", caption=caption, caption_justify="left")
    table.add_column("workload", overflow="fold")
    for name in ("context", "c", "T", "variant", "tok/s a user", "tok/s total", "TTFT ms", "tau", "errors"):
        table.add_column(name, justify="right", no_wrap=name in ("c", "T"))
    for cell in cells:
        key = cell.key
        table.add_row(
            key.workload,
            "as is" if key.context_tokens is None else str(key.context_tokens),
            str(key.concurrency),
            f"{key.temperature:g}",
            key.variant,
            told(cell.user_tok_s, ".1f"),
            told(cell.total_tok_s, ".1f") + ("" if cell.total_is_steady else " *"),
            told(cell.ttft_ms, ".1f"),
            told(cell.tau, ".2f"),
            f"{sum(cell.errors.values())}/{cell.requests}",
        )
    return table


def told(estimate: Estimate | None, spec: str) -> str:
    """A value and its interval, or a dash."""
    return "-" if estimate is None else f"{estimate:{spec}}".replace("[", "(").replace("]", ")")
