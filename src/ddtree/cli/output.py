"""Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import math
import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

_PLAIN_INTERVAL_S = 10.0


class _ResultConsole(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command, whose exit code 1 means something else."""
        raise BrokenPipeError


def result_console() -> Console:
    """For tables and drawings on stdout; plain text where that is no terminal."""
    return _ResultConsole(highlight=False)


def note(text: str) -> None:
    """A remark for the person at the terminal, beside the results."""
    Console(stderr=True, highlight=False, style="dim").print(text, markup=False, soft_wrap=True)


def print_json(content: dict[str, Any]) -> None:
    """One object on one line of stdout; a number that JSON does not know (infinity, NaN) becomes null."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(_finite(content), ensure_ascii=not utf8, allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


class ProgressLine:
    """What is being done and how far it is: a moving bar on a terminal, a line a stage elsewhere; always on stderr.

    Called like the engine's ``on_progress``: with the stage and its done fraction.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
                BarColumn(bar_width=14),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=console,
                transient=True,
                expand=True,
            )
        self._stage: str | None = None
        self._task: TaskID | None = None
        self._printed_at = 0.0

    def __enter__(self) -> ProgressLine:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, stage: str, fraction: float) -> None:
        if self._bar:
            if stage != self._stage:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._task = self._bar.add_task(stage, total=None)  # a running light until there is a fraction
            if self._task is not None and fraction > 0:
                self._bar.update(self._task, total=1.0, completed=fraction)
        elif stage != self._stage or time.monotonic() - self._printed_at > _PLAIN_INTERVAL_S:
            percent = f" {fraction:.0%}" if fraction > 0 else ""
            print(f"{stage}{percent} ...", file=sys.stderr, flush=True)
            self._printed_at = time.monotonic()
        self._stage = stage
