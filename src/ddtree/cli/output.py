"""Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from ddtree.cli.moving_line import MovingLine


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


class ProgressLine(MovingLine):
    """What is being done and how far it is: a moving bar on a terminal, a line a stage elsewhere; always on stderr.

    Called like the engine's ``on_progress``: with the stage and its done fraction.
    """

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=14),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            expand=True,
        )

    def __call__(self, stage: str, fraction: float) -> None:
        if self.bar:
            if stage != self.stage:
                self.begin(stage)
            if fraction > 0:
                self.move(total=1.0, completed=fraction)
        elif self.is_due(stage):
            percent = f" {fraction:.0%}" if fraction > 0 else ""
            self.print(f"{stage}{percent} ...")
        self.stage = stage
