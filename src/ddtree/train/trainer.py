"""One step of training: a micro-batch through target, drafter and loss, and the change of weights."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ddtree.models.target import Target
from ddtree.train.anchors import DepthPlan, draw_anchors, draw_looks, plan_depths
from ddtree.train.compiling import Wrap
from ddtree.train.loss import STATISTICS, BlockLoss, LossOfBlocks
from ddtree.train.optimizer import Optimizer
from ddtree.train.packing import PackedRows, RowStream
from ddtree.train.parallel import Group
from ddtree.train.settings import TrainSettings
from ddtree.train.taps import FrozenTarget
from ddtree.train.trainable_drafter import DraftPass, TrainableDrafter

PREFETCHED = 4
HELD_OUT_SEED = 0x48454C44
Clock = Callable[[str], AbstractContextManager[None]]
"""Measures a part of a step; see `ddtree.train.step_times`."""


def no_clock(part: str) -> AbstractContextManager[None]:
    """Measures nothing."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class StepResult:
    """What a step left behind; on the device, so that the host need not wait.

    Attributes:
        loss: mean over this process's micro-batches.
        gradient_norm: before clipping.
        by_depth: sums of this process, as in `BlockLoss`.
    """

    loss: torch.Tensor
    gradient_norm: torch.Tensor
    by_depth: torch.Tensor


class Trainer:
    """Target, drafter and optimizer of one process.

    Args:
        wrap: see `ddtree.train.compiling`.
    """

    def __init__(
        self, settings: TrainSettings, target: Target, drafter: TrainableDrafter, group: Group, wrap: Wrap
    ) -> None:
        batch, device = settings.batch, target.device
        self.settings, self.drafter, self._group, self._device = settings, drafter, group, device
        self._target = FrozenTarget(target, drafter.config.tap_layers, batch.rows, batch.row_tokens, wrap)
        self._draft = DraftPass(
            drafter, target, batch.rows, batch.row_tokens, batch.anchors_per_row, settings.draft_window, wrap
        )
        self._depths = drafter.config.block_size - 1
        plan = plan_depths(batch.anchors_per_row, self._depths, settings.objective.head_share)
        self._plan = DepthPlan(plan.reach.to(device), plan.chance.to(device))
        self._loss = LossOfBlocks(settings.objective, self._plan, target.head)
        self._random = torch.Generator(device)
        self.optimizer = Optimizer(drafter.parameters(), settings.optimization)

    def step(self, number: int, batches: Iterator[PackedRows], progress: float, clock: Clock = no_clock) -> StepResult:
        """Train on the next micro-batches.

        Args:
            number: of the step.
            batches: gives this process's micro-batches, from that of this step on.
            progress: share of the run that is done.
        """
        accumulation = self.settings.batch.accumulation
        loss_sum = torch.zeros((), device=self._device)
        by_depth = torch.zeros(len(STATISTICS), self._depths, device=self._device)
        for micro in micro_batches(number, accumulation, self._group):
            loss = self._forward(next(batches).to(self._device), self.settings.seed, micro, clock)
            with clock("backward"):
                (loss.total / (accumulation * self._group.size)).backward()
            loss_sum += loss.total.detach() / accumulation
            by_depth += loss.by_depth
        with clock("optimizer"):
            self._group.sum_gradients(self.drafter.parameters())
            norm = self.optimizer.step(progress)
        return StepResult(loss_sum, norm, by_depth)

    def _forward(
        self, rows: PackedRows, seed: int, number: int, clock: Clock = no_clock, *, is_trained: bool = True
    ) -> BlockLoss:
        """The loss of blocks at places that follow from ``seed`` and ``number``."""
        self._random.manual_seed((seed << 31) ^ number)
        anchors = draw_anchors(rows, self.settings.batch.anchors_per_row, self._depths, self._random)
        looks = draw_looks(self._plan, len(rows.tokens), self._depths, self._random)
        with clock("target"):
            seen = self._target(rows, says_next=self.settings.objective.needs_distribution)
        with clock("drafter"):  # not under no_grad where it is not trained: it would be compiled once more
            hidden = self._draft(rows, anchors, looks, seen.taps)
        with clock("head and loss"):
            return self._loss(hidden if is_trained else hidden.detach(), seen.last, anchors, looks)

    def held_out(self, batches: list[PackedRows]) -> torch.Tensor:
        """Sums by depth (as in `BlockLoss`) over held-out rows, always at the same places."""
        by_depth = torch.zeros(len(STATISTICS), self._depths, device=self._device)
        for i, rows in enumerate(batches):
            if i % self._group.size != self._group.rank:
                continue
            by_depth += self._forward(rows.to(self._device), HELD_OUT_SEED, i, is_trained=False).by_depth
        return self._group.total(by_depth)


def micro_batches(step: int, accumulation: int, group: Group) -> range:
    """Numbers of the micro-batches of one process in one step.

    All processes together work through what one process would with so much more accumulation.
    """
    per_step = accumulation * group.size
    return range(step * per_step + group.rank, (step + 1) * per_step, group.size)


class Prefetched:
    """Micro-batches of this process from a step on, packed by a thread while the device is busy.

    Use it as a context; leaving it ends the thread.
    """

    def __init__(self, stream: RowStream, first_step: int, accumulation: int, group: Group) -> None:
        self._numbers = _numbers_from(first_step, accumulation, group)
        self._stream = stream
        self._ready: queue.Queue[PackedRows | BaseException] = queue.Queue(PREFETCHED)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="packing", daemon=True)

    def __enter__(self) -> Prefetched:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._thread.join()

    def __iter__(self) -> Prefetched:
        return self

    def __next__(self) -> PackedRows:
        ready = self._ready.get()
        if isinstance(ready, BaseException):
            raise ready
        return ready

    def _work(self) -> None:
        try:
            for number in self._numbers:
                self._put(self._stream.batch(number))
                if self._is_over.is_set():
                    return
        except BaseException as error:  # the one who asks for a batch is to hear of it
            self._put(error)

    def _put(self, ready: PackedRows | BaseException) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(ready, timeout=0.2)
                return


def _numbers_from(first_step: int, accumulation: int, group: Group) -> Iterator[int]:
    step = first_step
    while True:
        yield from micro_batches(step, accumulation, group)
        step += 1
