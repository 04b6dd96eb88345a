"""The engine's pulse: what happened in the last seconds and rounds, for pages and probes."""

import threading
import time
from collections import deque
from dataclasses import dataclass

from ddtree.engine import Occupancy, TracedTree

ROLLING_ROUNDS = 512
ROLLING_S = 10.0
WATCH_S = 5.0
"""After a look at the page, trees are recorded for so long."""


@dataclass(frozen=True)
class Beat:
    """One look at the pulse.

    Attributes:
        tau: committed tokens per round over the last rounds; None before the first.
        tok_s: tokens a second over the last seconds.
        in_step_s: see `Pulse.in_step_s`.
        tree: the last recorded round.
    """

    tau: float | None
    tok_s: float
    in_step_s: float
    occupancy: Occupancy | None
    tree: TracedTree | None


class Pulse:
    """Written by the engine thread, read by the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accepted: deque[int] = deque(maxlen=ROLLING_ROUNDS)
        self._written: deque[tuple[float, int]] = deque()
        self._written_tokens = 0  # their sum: on a GPU there are thousands of them
        self._step_began: float | None = None
        self._watched_until = 0.0
        self._occupancy: Occupancy | None = None
        self._tree: TracedTree | None = None

    def step_begins(self) -> None:
        self._step_began = time.monotonic()

    def step_ends(self, accepted_lengths: list[int], tokens: int, occupancy: Occupancy) -> None:
        """Note what a step brought."""
        now = time.monotonic()
        with self._lock:
            self._step_began = None
            self._occupancy = occupancy
            self._accepted.extend(accepted_lengths)
            if tokens:
                self._written.append((now, tokens))
                self._written_tokens += tokens
            self._forget(now)

    def saw(self, tree: TracedTree) -> None:
        """Keep a round's tree for the page."""
        self._tree = tree

    @property
    def wants_tree(self) -> bool:
        """Whether somebody has looked lately, so that recording a tree is worth its while."""
        return time.monotonic() < self._watched_until

    def watch(self) -> None:
        """Somebody looks."""
        self._watched_until = time.monotonic() + WATCH_S

    @property
    def in_step_s(self) -> float:
        """How long the step that runs now has taken; 0 between steps."""
        began = self._step_began
        return time.monotonic() - began if began is not None else 0.0

    def look(self) -> Beat:
        """How things stand."""
        now = time.monotonic()
        with self._lock:
            self._forget(now)
            tau = sum(self._accepted) / len(self._accepted) if self._accepted else None
            return Beat(tau, self._written_tokens / ROLLING_S, self.in_step_s, self._occupancy, self._tree)

    def _forget(self, now: float) -> None:
        while self._written and self._written[0][0] < now - ROLLING_S:
            _, tokens = self._written.popleft()
            self._written_tokens -= tokens
