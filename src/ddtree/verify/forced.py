"""An answer held against the target along the answer's own path: which tokens are not the target's first choice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

NEAR_TIE_NATS = 0.5
"""Largest difference of log-probability, and so of logits, that rounding explains: 4 steps of bfloat16 for logits from
16 to 32. Over HTTP a logit's own size is not told, so the bound is fixed."""

EXACT_NATS = 1e-3
"""The same for float32, where other orders of summation move the last bits only."""


@dataclass(frozen=True)
class Divergence:
    """A token that is not the target's first choice.

    Attributes:
        index: its place in the answer.
        gap: log-probability of the first choice less that of the token, in nats; infinite where the token is not even
            among the alternatives that were told.
    """

    index: int
    token: str
    top: str
    gap: float

    def is_fault(self, bound_nats: float) -> bool:
        return not self.gap <= bound_nats


@dataclass(frozen=True)
class Forced:
    """What came of holding an answer against the target.

    Attributes:
        tokens: how many were held against the target.
        divergences: those that are not its first choice, in order.
        method: how it was done, for people.
        cut_short: why not all of the answer was checked, if so.
    """

    tokens: int
    divergences: tuple[Divergence, ...]
    method: str
    cut_short: str = ""

    @property
    def worst_gap(self) -> float:
        return max((each.gap for each in self.divergences), default=0.0)

    def histogram(self) -> str:
        """Gaps in classes, such as `0-0.1: 2, 0.1-0.25: 1`."""
        edges = (0.0, 0.1, 0.25, 0.5, 1.0, math.inf)
        counts = [
            sum(low <= each.gap < high or (high == math.inf and each.gap == high) for each in self.divergences)
            for low, high in pairwise(edges)
        ]
        names = [f"{low:g}-{high:g}" for low, high in pairwise(edges)]
        return ", ".join(f"{name}: {count}" for name, count in zip(names, counts, strict=True) if count) or "none"
