"""How long work tells what it is doing."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with the name of the stage and the done fraction of it, 0.0 to 1.0."""


def silent(stage: str, fraction: float) -> None:
    """Report to nobody."""
