"""How far a training run is: a bar on a terminal, a line now and then elsewhere; always on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ddtree.cli.moving_line import MovingLine

if TYPE_CHECKING:
    from ddtree.train.run_log import DepthMeans
    from ddtree.train.step_times import StepTimes
    from ddtree.train.watching import Told, Watcher


class TrainProgress(MovingLine):
    """Tells on stderr what a run does."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[seen]}", style="dim"),
        )
        self.begin("starting", seen="")

    def watcher(self) -> Watcher:
        """What a run is to call."""
        from ddtree.train.watching import Watcher

        return Watcher(
            on_stage=self.say_stage,
            on_step=self._step,
            on_held_out=self._held_out,
            on_tau=self._tau,
            on_times=self._times,
        )

    def _step(self, told: Told) -> None:
        seen = (
            f"step {told.step}, loss {told.loss:.3f}, tau about {told.tau:.2f}, "
            f"{told.anchors_s:,.0f} blocks/s, epoch {told.epoch:.2f}"
        )
        if self.bar:
            self.move(description="training", total=1.0, completed=told.progress, seen=seen)
        else:
            self.print(f"[{told.progress:4.0%}] {told.train_s:.0f} s, {seen}")

    def _held_out(self, step: int, means: DepthMeans) -> None:
        hits = " ".join(f"{hit:.2f}" for hit in means.hits)
        self.print(f"held out, step {step}: loss {means.loss:.3f}, tau about {means.tau:.3f}, hits by depth {hits}")

    def _tau(self, step: int, tau: dict[str, float]) -> None:
        self.print(f"tau, step {step}: " + ", ".join(f"{name} {value:.3f}" for name, value in tau.items()))

    def _times(self, times: StepTimes) -> None:
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms in times.parts_ms.items())
        memory = "" if times.peak_memory_gib is None else f", {times.peak_memory_gib:.1f} GiB at most"
        self.print(
            f"a step takes {times.step_ms:.1f} ms ({parts}): {times.tokens_s:,.0f} tokens/s, "
            f"{times.anchors_s:,.0f} blocks/s{memory}"
        )
