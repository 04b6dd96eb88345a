"""How far a measurement is, and what it has seen so far: a bar on a terminal, a line a unit elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ddtree.bench.numbers import CellNumbers
from ddtree.bench.record import RequestRow, Unit, UnitRow
from ddtree.bench.run import Watcher
from ddtree.bench.statistics import Estimate


class BenchProgress:
    """Tells on stderr what a run does."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[seen]}", style="dim"),
                console=console,
                transient=True,
            )
            self._units = self._bar.add_task("starting", total=None, seen="")
        self._count = self._done = self._rows = self._errors = 0
        self._tokens = 0
        self._last_stage = ""
        self._since = time.perf_counter()

    def __enter__(self) -> BenchProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def watcher(self) -> Watcher:
        """What a run is to call."""
        return Watcher(
            on_plan=self._plan,
            on_stage=self.stage,
            on_unit=self._unit,
            on_row=self._row,
            on_unit_done=self._unit_done,
        )

    def _plan(self, units: Sequence[Unit], done: int) -> None:
        self._count, self._done = len(units), done
        if self._bar:
            self._bar.update(self._units, total=len(units), completed=done)
        elif done:
            self._line(f"{done} of {len(units)} units are done already")

    def stage(self, stage: str) -> None:
        """What is being done before there are units, once for each that is new."""
        if self._bar:
            self._bar.update(self._units, description=stage)
        elif stage != self._last_stage:
            self._line(f"{stage} ...")
        self._last_stage = stage

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            self._line(line)

    def _unit(self, unit: Unit) -> None:
        self._since, self._tokens = time.perf_counter(), 0
        if self._bar:
            self._bar.update(self._units, description=unit.name)

    def _row(self, row: RequestRow) -> None:
        self._rows += 1
        self._errors += row.error_kind is not None
        self._tokens += row.completion_tokens or 0
        if self._bar:
            speed = self._tokens / max(1e-9, time.perf_counter() - self._since)
            errors = f", {self._errors} errors" if self._errors else ""
            self._bar.update(self._units, seen=f"{speed:.0f} tok/s, {self._rows} requests{errors}")

    def _unit_done(self, unit: UnitRow) -> None:
        self._done += 1
        if self._bar:
            self._bar.update(self._units, completed=self._done)
        else:
            errors = f", errors: {unit.errors}" if unit.errors else ""
            self._line(f"[{self._done}/{self._count}] {unit.unit}: {unit.whole_tok_s:.1f} tok/s{errors}")

    def _line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def numbers_table(cells: Sequence[CellNumbers]) -> Table:
    """The cells with their medians and intervals."""
    table = Table(box=None, pad_edge=False, header_style="bold")
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
            told(cell.total_tok_s, ".1f"),
            told(cell.ttft_ms, ".1f"),
            told(cell.tau, ".2f"),
            f"{sum(cell.errors.values())}/{cell.requests}",
        )
    return table


def told(estimate: Estimate | None, spec: str) -> str:
    """A value and its interval, or a dash."""
    return "-" if estimate is None else f"{estimate:{spec}}".replace("[", "(").replace("]", ")")
