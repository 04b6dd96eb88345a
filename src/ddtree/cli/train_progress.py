"""How far a training run is: a bar on a terminal, a line now and then elsewhere; always on stderr."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from ddtree.train.run_log import DepthMeans
    from ddtree.train.step_times import StepTimes
    from ddtree.train.watching import Told, Watcher


class TrainProgress:
    """Tells on stderr what a run does."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar: Progress | None = None
        self._last_stage = ""
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[seen]}", style="dim"),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=None, seen="")

    def __enter__(self) -> TrainProgress:
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
        from ddtree.train.watching import Watcher

        return Watcher(
            on_stage=self.stage,
            on_step=self._step,
            on_held_out=self._held_out,
            on_tau=self._tau,
            on_times=self._times,
        )

    def stage(self, stage: str, fraction: float = 0.0) -> None:
        """What is being done, once for each that is new."""
        if stage == self._last_stage:
            return
        self._last_stage = stage
        if self._bar:
            self._bar.update(self._task, description=stage)
        else:
            self._say(f"{stage} ...")

    def _step(self, told: Told) -> None:
        seen = (
            f"step {told.step}, loss {told.loss:.3f}, tau about {told.tau:.2f}, "
            f"{told.anchors_s / 1e3:.1f}k blocks/s, epoch {told.epoch:.2f}"
        )
        if self._bar:
            self._bar.update(self._task, description="training", total=1.0, completed=told.progress, seen=seen)
        else:
            self._say(f"[{told.progress:4.0%}] {told.train_s:.0f} s, {seen}")

    def _held_out(self, step: int, means: DepthMeans) -> None:
        hits = " ".join(f"{hit:.2f}" for hit in means.hits)
        self._say(f"held out, step {step}: loss {means.loss:.3f}, tau about {means.tau:.3f}, hits by depth {hits}")

    def _tau(self, step: int, tau: dict[str, float]) -> None:
        self._say(f"tau, step {step}: " + ", ".join(f"{name} {value:.3f}" for name, value in tau.items()))

    def _times(self, times: StepTimes) -> None:
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms in times.parts_ms.items())
        memory = "" if times.peak_memory_gib is None else f", {times.peak_memory_gib:.1f} GiB at most"
        self._say(
            f"a step takes {times.step_ms:.1f} ms ({parts}): {times.tokens_s / 1e3:.1f}k tokens/s, "
            f"{times.anchors_s / 1e3:.1f}k blocks/s{memory}"
        )

    def _say(self, line: str) -> None:
        """A line that stays."""
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)
