"""What the probes of one verification share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ddtree.verify.baseline import Baseline
from ddtree.verify.effective import Counters, Effective
from ddtree.verify.engines import Adapter
from ddtree.verify.expectation import Expectation
from ddtree.verify.host_process import HostProcess
from ddtree.verify.http_client import CheckFailed
from ddtree.verify.revision import ReadFile

Tell = Callable[[str, float], None]
_COUNTED_WITHIN_S = 3.0


@dataclass(frozen=True)
class Options:
    """How hard to look.

    Attributes:
        answer_timeout_s: longest wait for one short answer.
        info_timeout_s: the same for facts.
        probe_tokens: tokens of each answer of the speculation probe.
        long_tokens: prompt tokens of the long-context probe, at most; 0 leaves it out.
        concurrency: requests at once, at most; below 2 leaves it out.
        speed_tokens: tokens of each timed stream.
        speed_tolerance: slower than this share of the baseline is a violation.
        baseline: compare with and keep baselines.
        log: recent lines of the engine's log, where they can be had.
        read: files of the server's machine, where they can be had.
    """

    answer_timeout_s: float = 120.0
    info_timeout_s: float = 15.0
    probe_tokens: int = 64
    long_tokens: int = 4096
    concurrency: int = 4
    speed_tokens: int = 96
    speed_tolerance: float = 0.6
    baseline: bool = True
    log: Callable[[], str] | None = None
    read: ReadFile | None = None


@dataclass
class Session:
    """One verification under way.

    Attributes:
        baseline: of the last verified run at this address, if there is one.
        process: the process that listens, where it is on this machine and can be seen.
        is_here: the server's files are this machine's.
        measured: numbers found on the way.
        log_before: the end of the engine's log before the speculation probe.
        moved: how far the engine's counters went during the speculation probe.
        fingerprint: what the model said to the fingerprint prompts, for the next baseline.
        prompt_tokens: tokens of those prompts.
    """

    adapter: Adapter
    effective: Effective
    expectation: Expectation
    options: Options
    baseline: Baseline | None = None
    process: HostProcess | None = None
    is_here: bool = False
    measured: dict[str, float] = field(default_factory=dict)
    moved: Counters | None = None
    log_before: str = ""
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    fingerprint: dict[str, dict[str, float]] = field(default_factory=dict)

    def health(self) -> str:
        """What `/health` says, for messages about answers that do not come."""
        status = self.adapter.http.status("/health", min(5.0, self.options.info_timeout_s))
        return f"/health answers {status}" if status is not None else "/health does not answer either"

    def moved_since(self, before: Counters, tokens: int) -> Counters:
        """How far the counters went; some engines count an answer a moment after it was sent. Raises CheckFailed.

        Args:
            tokens: that the answers since then have.
        """
        deadline = time.monotonic() + _COUNTED_WITHIN_S
        while True:
            moved = self.adapter.counters().since(before)
            if moved.completion_tokens is None or moved.completion_tokens >= tokens or time.monotonic() > deadline:
                return moved
            time.sleep(0.1)


def lines_since(before: str, now: str) -> str:
    """What a log grew by, of which only the end is seen; nothing where the two ends do not meet."""
    mark = before[-400:]
    return now if not mark else now.rpartition(mark)[2] if mark in now else ""


def first_line(error: CheckFailed) -> str:
    return " ".join(str(error).split())[:300]
