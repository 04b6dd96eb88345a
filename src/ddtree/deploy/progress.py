"""How far an apply is, for people who wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """What is going on right now.

    Attributes:
        stage: in words.
        elapsed_s: since the service was started; None before that.
        gpu_used_mib, gpu_total_mib: memory of all GPUs of the host; None where it has none.
        share: how much of the stage is done, 0 to 1, where the engine tells.
        log_line: the last line of the service's log, where the engine does not tell its stage.
    """

    stage: str
    elapsed_s: float | None = None
    gpu_used_mib: int | None = None
    gpu_total_mib: int | None = None
    share: float | None = None
    log_line: str | None = None


Tell = Callable[[Progress], None]


def quiet(progress: Progress) -> None:
    """Tell nobody."""
