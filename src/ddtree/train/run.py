"""A training run in a folder: steps, logs, checkpoints, looks at held-out text and at tau, and the finished drafter."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from ddtree.errors import UserError
from ddtree.train.anchors import depth_decay
from ddtree.train.checkpoint import Checkpoint, fitting, read_checkpoint, write_checkpoint
from ddtree.train.compiling import choose_wrap
from ddtree.train.packing import PackedRows, RowStream, held_out_batches
from ddtree.train.parallel import Group, join_group
from ddtree.train.preparation import Prepared, device_name, prepare
from ddtree.train.quick_tau import quick_tau
from ddtree.train.run_folder import RunFolder, RunState
from ddtree.train.run_log import DepthMeans, by_depth_values, depth_means
from ddtree.train.settings import TrainSettings
from ddtree.train.step_times import StepClock
from ddtree.train.trainer import Prefetched, StepResult, Trainer
from ddtree.train.watching import StepSums, Told, Watcher

MEASURED_STEPS = range(10, 20)
LOG_EVERY_S = 5.0


@dataclass(frozen=True)
class RunOptions:
    """How a run is driven; nothing of this changes what is learnt.

    Attributes:
        folder: of the run.
        resume: go on from the folder's checkpoint.
        stop_after_s: end, with a checkpoint, so many seconds after the process's start.
        checkpoint_every_s: seconds between checkpoints.
        look_every: steps between two looks at the clock, for which the host waits for the device.
        threads: of the CPU; torch's default if None.
        started_at: `time.monotonic` of the process's start.
    """

    folder: Path
    resume: bool = False
    stop_after_s: float | None = None
    checkpoint_every_s: float = 60.0
    look_every: int = 10
    threads: int | None = None
    started_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        finished: the schedule is through; else it was stopped, and can go on.
        drafter: folder of the drafter as it is.
    """

    finished: bool
    interrupted: bool
    step: int
    train_s: float
    drafter: Path


def train(settings: TrainSettings, options: RunOptions, watcher: Watcher) -> Outcome:
    """Run, or go on with, a training run.

    Raises:
        UserError: bad settings, data, target or drafter; a folder in use; a full disk; a loss that is not finite.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    group, device = join_group(settings.device)
    with ExitStack() as stack:
        stack.callback(group.leave)
        folder = stack.enter_context(RunFolder.open(options.folder, settings, options.resume, group))
        if (state := folder.finished_state()) is not None:
            return Outcome(True, False, state.step, state.train_s, folder.drafter)
        prepared = prepare(settings, device, watcher.on_stage if group.leads else lambda stage: None)
        run = _Run(settings, options, watcher, group, prepared, folder)
        folder.begin(settings)
        with _signals() as signals:
            return run.run(signals)


@dataclass
class _Signals:
    came: bool = False


@contextmanager
def _signals() -> Iterator[_Signals]:
    """Ctrl-C and SIGTERM end the run after the step, with a checkpoint."""
    signals = _Signals()

    def note(number: int, frame: FrameType | None) -> None:
        signals.came = True

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Run:
    """One process's part of a run."""

    def __init__(
        self,
        settings: TrainSettings,
        options: RunOptions,
        watcher: Watcher,
        group: Group,
        prepared: Prepared,
        folder: RunFolder,
    ) -> None:
        self._settings, self._options, self._watcher, self._group = settings, options, watcher, group
        self._prepared, self._folder = prepared, folder
        self._device = prepared.target.device
        self._trainer = Trainer(settings, prepared.target, prepared.drafter, group, choose_wrap(self._device))
        self._stream = RowStream(prepared.corpus, settings.batch.rows, settings.seed)
        self._held_out = held_out_batches(prepared.corpus, settings.batch.rows)
        depths = prepared.drafter.config.block_size - 1
        self._decay = depth_decay(depths, settings.objective.decay_tokens)
        self._per_step = settings.batch.accumulation * settings.batch.rows * group.size
        self._step, self._train_s = 0, 0.0
        checkpoint = read_checkpoint(options.folder, self._device) if options.resume else None
        if checkpoint is not None:
            self._step, self._train_s = checkpoint.step, checkpoint.train_s
            with fitting(options.folder):
                prepared.drafter.load(checkpoint.drafter)
                self._trainer.optimizer.restore(checkpoint.optimizer)
        is_through = self._progress() >= 1  # killed between the last checkpoint and the end: the last look comes anew
        if group.leads:
            folder.open_logs(depths, self._step, self._step - is_through)
        self._began_at_step, self._since = self._step, StepSums(depths, self._device)
        self._pace = 0.0  # progress of one step
        self._clock = StepClock(self._device)
        self._looks = 0
        self._last_means: DepthMeans | None = None
        self._saved_at = time.monotonic()
        self._looked_at_s, self._looked_at_step = self._train_s, self._step

    def run(self, signals: _Signals) -> Outcome:
        """Step until the schedule is through, the time is up, or a signal comes."""
        late = interrupted = False
        with Prefetched(self._stream, self._step, self._settings.batch.accumulation, self._group) as batches:
            while self._progress() < 1 and not late and not interrupted:
                self._stretch(batches)
                late, interrupted = self._has_to_stop(signals)
                if late or interrupted or time.monotonic() - self._saved_at >= self._options.checkpoint_every_s:
                    self._save()
                if self._is_due() and not late and not interrupted and self._progress() < 1:
                    self._look(is_last=False)
        finished = self._progress() >= 1
        if finished:
            self._save()
            self._look(is_last=True)
        if self._group.leads:
            self._folder.finish(self._prepared, self._settings, self._state(finished))
        return Outcome(finished, interrupted, self._step, self._train_s, self._folder.drafter)

    def _has_to_stop(self, signals: _Signals) -> tuple[bool, bool]:
        """Whether the time is up, and whether somebody interrupts; the same in all processes."""
        used_s = time.monotonic() - self._options.started_at
        late = self._options.stop_after_s is not None and used_s >= self._options.stop_after_s
        said = self._group.agree([float(late), float(signals.came)], self._device)
        return bool(said[0]), bool(said[1])

    def _progress(self) -> float:
        schedule = self._settings.schedule
        if schedule.steps is not None:
            return self._step / schedule.steps
        assert schedule.seconds is not None
        return self._train_s / schedule.seconds

    def _stretch(self, batches: Iterator[PackedRows]) -> None:
        """Some steps for which the host does not wait, then a look at the clock and the loss."""
        is_first = self._step == self._began_at_step
        if is_first and self._group.leads:
            self._watcher.on_stage("compiling" if self._device.type == "cuda" else "training")
        steps = 1 if is_first else self._options.look_every
        if self._settings.schedule.steps is not None:
            steps = min(steps, self._settings.schedule.steps - self._step)
        elif self._pace:
            steps = min(steps, math.ceil((1 - self._progress()) / self._pace))
        progress, begin = self._progress(), time.monotonic()
        for i in range(steps):
            if self._settings.schedule.steps is not None:
                progress_now = self._step / self._settings.schedule.steps
            else:
                progress_now = progress + i * self._pace
            self._since.add(self._one_step(batches, progress_now))
            self._step += 1
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        (took_s,) = self._group.agree([time.monotonic() - begin], self._device)
        if not is_first:  # which compiles
            self._train_s += took_s
            self._since.train_s += took_s
            if self._settings.schedule.seconds is not None:
                self._pace = took_s / steps / self._settings.schedule.seconds
        self._check_finite()
        if self._since.train_s >= LOG_EVERY_S or self._progress() >= 1:
            self._tell()

    def _one_step(self, batches: Iterator[PackedRows], progress: float) -> StepResult:
        number = self._step - self._began_at_step
        if number not in MEASURED_STEPS:
            return self._trainer.step(self._step, batches, progress)
        with self._clock.step():
            result = self._trainer.step(self._step, batches, progress, self._clock)
        if number == MEASURED_STEPS[-1] and self._group.leads:
            batch = self._settings.batch
            times = self._clock.times(self._per_step * batch.row_tokens, self._per_step * batch.anchors_per_row)
            self._folder.write_times(times)
            self._watcher.on_times(times)
        return result

    def _check_finite(self) -> None:
        if not math.isfinite(float(self._since.loss)):
            raise UserError(
                f"the loss is not finite at step {self._step}",
                "lower the learning rates and start anew; the last checkpoint is from before",
            )

    def _tell(self) -> None:
        """Log what the steps since the last time came to."""
        since, self._since = self._since, StepSums(self._since.by_depth.shape[1], self._device)
        means = depth_means(self._group.total(since.by_depth), self._decay, self._settings.objective)
        if not self._group.leads:
            return
        batch = self._settings.batch
        rows_s = since.steps * self._per_step / since.train_s if since.train_s else 0.0
        told = Told(
            step=self._step,
            progress=min(self._progress(), 1.0),  # the clock is looked at after the last steps
            train_s=self._train_s,
            epoch=self._step * self._per_step / self._stream.rows_per_epoch,
            loss=means.loss,
            tau=means.tau,
            gradient_norm=float(since.gradient_norm) / since.steps,
            tokens_s=rows_s * batch.row_tokens,
            anchors_s=rows_s * batch.anchors_per_row,
        )
        self._folder.log_steps([*vars(told).values(), *by_depth_values(means)])
        self._watcher.on_step(told)

    def _is_due(self) -> bool:
        every = self._settings.held_out
        by_time = every.every_s is not None and self._train_s - self._looked_at_s >= every.every_s
        by_steps = every.every_steps is not None and self._step - self._looked_at_step >= every.every_steps
        return by_time or by_steps

    def _look(self, *, is_last: bool) -> None:
        """At held-out text, and now and then at tau."""
        means = depth_means(self._trainer.held_out(self._held_out), self._decay, self._settings.objective)
        self._last_means = means
        self._looks += 1
        self._looked_at_s, self._looked_at_step = self._train_s, self._step
        if not self._group.leads:
            return
        values = [self._step, self._train_s, means.loss, means.tau, *by_depth_values(means)]
        self._folder.log_held_out(values)
        self._watcher.on_held_out(self._step, means)
        wanted = self._settings.held_out
        if wanted.tau_prompts and (is_last or self._looks % wanted.tau_every == 0):
            self._watcher.on_stage("measuring tau")
            self._prepared.drafter.save(self._folder.drafter)
            tau = quick_tau(self._settings, self._folder.drafter, self._device)
            self._folder.log_tau(self._step, tau)
            self._watcher.on_tau(self._step, tau)

    def _save(self) -> None:
        self._saved_at = time.monotonic()
        if self._group.leads:
            state, optimizer = self._prepared.drafter.state_dict(), self._trainer.optimizer.state()
            write_checkpoint(self._options.folder, Checkpoint(self._step, self._train_s, state, optimizer))

    def _state(self, finished: bool) -> RunState:
        return RunState(
            step=self._step,
            train_s=self._train_s,
            anchors=self._step * self._per_step * self._settings.batch.anchors_per_row,
            finished=finished,
            devices=self._group.size,
            device=device_name(self._device),
            held_out_loss=self._last_means.loss if self._last_means else None,
            held_out_hits=self._last_means.hits if self._last_means else [],
        )
