"""Finding answers that go round in circles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

COPIES = 3
"""A stretch of tokens that stands so often in a row is a loop."""
LEAST_TOKENS = 48
"""What the copies after the first must have together: shorter repetition is style, such as the rows of a table."""


def loop_ends(answers: Sequence[npt.NDArray[np.integer] | Sequence[int]]) -> list[int | None]:
    """For each answer, where its first loop is complete; None where it has none.

    A loop is a stretch of any length that is followed by itself until there are three copies of it, the last two with
    48 tokens or more. Up to the index that is returned, that much and no more of it is there.

    Args:
        answers: token ids, each answer of any length.
    """
    longest = max((len(answer) for answer in answers), default=0)
    padded = np.full((len(answers), longest), -1, np.int64)
    for row, answer in zip(padded, answers, strict=True):
        row[: len(answer)] = answer
    found: list[int | None] = [None] * len(answers)
    for period in range(1, longest // COPIES + 1):
        needed = max((COPIES - 1) * period, LEAST_TOKENS)
        if period + needed > longest:
            break
        equal = (padded[:, period:] == padded[:, :-period]) & (padded[:, period:] >= 0)
        for i in np.flatnonzero(equal.sum(1) >= needed):
            end = _first_run(equal[i], needed)
            if end is not None:
                end += period
                found[i] = end if found[i] is None else min(found[i], end)  # type: ignore[type-var]
    return found


def _first_run(flags: npt.NDArray[np.bool_], length: int) -> int | None:
    """Where the first run of ``length`` true flags ends, exclusive."""
    place = np.arange(1, len(flags) + 1)
    run = place - np.maximum.accumulate(np.where(flags, 0, place))
    ends = np.flatnonzero(run >= length)
    return int(ends[0]) + 1 if len(ends) else None
