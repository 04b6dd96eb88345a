"""What a run tells while it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ddtree.train.loss import STATISTICS
from ddtree.train.run_log import DepthMeans
from ddtree.train.step_times import StepTimes
from ddtree.train.trainer import StepResult


@dataclass(frozen=True)
class Told:
    """How far a run is, for whoever watches.

    Attributes:
        progress: share of the run that is done.
        tau: of a chain, with the context as the target wrote it, over the text just trained on.
    """

    step: int
    progress: float
    train_s: float
    epoch: float
    loss: float
    tau: float
    gradient_norm: float
    tokens_s: float
    anchors_s: float


@dataclass(frozen=True)
class Watcher:
    """Whom a run calls; in the first process alone."""

    on_stage: Callable[[str], None] = lambda stage: None
    on_step: Callable[[Told], None] = lambda told: None
    on_held_out: Callable[[int, DepthMeans], None] = lambda step, means: None
    on_tau: Callable[[int, dict[str, float]], None] = lambda step, tau: None
    on_times: Callable[[StepTimes], None] = lambda times: None


class StepSums:
    """Sums over the steps since the last row of the log; on the device, so that the host need not wait."""

    def __init__(self, depths: int, device: torch.device) -> None:
        self.steps, self.train_s = 0, 0.0
        self.by_depth = torch.zeros(len(STATISTICS), depths, device=device)
        self.gradient_norm = torch.zeros((), device=device)
        self.loss = torch.zeros((), device=device)

    def add(self, result: StepResult) -> None:
        self.steps += 1
        self.by_depth += result.by_depth
        self.gradient_norm += result.gradient_norm
        self.loss += result.loss
