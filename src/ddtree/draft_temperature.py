"""Which draft temperatures there are: at these a drafter's distributions are taken when a tree is built."""

from __future__ import annotations

COLDEST, HOTTEST = 0.1, 10.0
WANTED = f"a number from {COLDEST:g} to {HOTTEST:g}"


def is_draft_temperature(value: object) -> bool:
    """Whether somebody's ``value`` is one: a plain number in the range."""
    return isinstance(value, int | float) and not isinstance(value, bool) and COLDEST <= value <= HOTTEST
