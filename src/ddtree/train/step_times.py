"""Where the time of a step goes: a few steps are measured part by part, each waited for."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import torch
from pydantic import BaseModel


class StepTimes(BaseModel):
    """Means over the measured steps.

    Attributes:
        parts_ms: target, drafter (forward), head and loss (with its gradient), backward (drafter), optimizer.
        step_ms: of one step; what the parts leave over is data, anchors and masks.
        tokens_s: packed tokens a second, all processes.
        anchors_s: blocks a second, all processes.
    """

    steps: int
    step_ms: float
    parts_ms: dict[str, float]
    tokens_s: float
    anchors_s: float
    peak_memory_gib: float | None


class StepClock:
    """Times parts of steps. Waits for the device before and after each, which costs a little, so only a few steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._total = 0.0

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        begin = self._now()
        yield
        self._parts[part] += self._now() - begin

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One whole step."""
        begin = self._now()
        yield
        self._total += self._now() - begin
        self._steps += 1

    def times(self, tokens_per_step: int, anchors_per_step: int) -> StepTimes:
        """What was measured."""
        seconds = self._total / self._steps
        memory = torch.cuda.max_memory_allocated(self._device) / 2**30 if self._device.type == "cuda" else None
        return StepTimes(
            steps=self._steps,
            step_ms=seconds * 1e3,
            parts_ms={name: total / self._steps * 1e3 for name, total in self._parts.items()},
            tokens_s=tokens_per_step / seconds,
            anchors_s=anchors_per_step / seconds,
            peak_memory_gib=memory,
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
