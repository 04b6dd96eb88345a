"""One line on stderr that says how far something is: a moving bar on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

_PLAIN_INTERVAL_S = 10.0


class MovingLine:
    """What all such lines share; what moves and what the plain lines say is told by whoever inherits.

    Args:
        columns: of the bar.
        expand: the bar takes the terminal's whole width.

    Attributes:
        bar: None where stderr is no terminal.
    """

    def __init__(self, *columns: ProgressColumn, expand: bool = False) -> None:
        console = Console(stderr=True)
        self.bar = Progress(*columns, console=console, transient=True, expand=expand) if console.is_terminal else None
        self.stage: str | None = None
        self._task: TaskID | None = None
        self._printed_at = 0.0

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()

    def begin(self, stage: str, **fields: Any) -> None:
        """A bar for ``stage`` in the place of the one before: a running light until it is moved."""
        if self.bar:
            if self._task is not None:
                self.bar.remove_task(self._task)
            self._task = self.bar.add_task(stage, total=None, **fields)

    def move(self, **changes: Any) -> None:
        """Change what the bar shows; as :meth:`rich.progress.Progress.update` takes it."""
        if self.bar and self._task is not None:
            self.bar.update(self._task, **changes)

    def say_stage(self, stage: str) -> None:
        """What is being done, where nothing tells how far it is; a plain line for each that is new."""
        self.move(description=stage)
        if not self.bar and stage != self.stage:
            self.print(f"{stage} ...")
        self.stage = stage

    def is_due(self, stage: str) -> bool:
        """Whether a plain line should be printed: the stage is new, or the last line is some time ago."""
        return stage != self.stage or time.monotonic() - self._printed_at > _PLAIN_INTERVAL_S

    def print(self, text: str) -> None:
        """A plain line, or one that stays above the bar."""
        if self.bar:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)
        self._printed_at = time.monotonic()
