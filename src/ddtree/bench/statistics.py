"""Medians with bootstrap intervals, ratios, and intervals of shares. All of it is repeatable: seeds are fixed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
_MOST_DRAWN = 2**20


@dataclass(frozen=True)
class Estimate:
    """A value, its 95 % interval, and from how many independent pieces it was made."""

    value: float
    low: float
    high: float
    n: int

    def __format__(self, spec: str) -> str:
        spec = spec or ".3g"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def median_of_groups(groups: Sequence[Sequence[float]], seed: int = 0) -> Estimate | None:
    """The median of all values, which come in groups (the repetitions of a cell).

    The interval is a percentile bootstrap that draws groups first and values within each after that, so that what a
    repetition has in common is not counted as many observations. With fewer than 5 groups it is rather too narrow.
    """
    groups = [group for group in groups if group]
    if not groups:
        return None
    return _estimate(float(np.median(np.concatenate(groups))), _draws(groups, seed), len(groups))


def ratio_of_sums(tops: Sequence[float], bottoms: Sequence[float], seed: int = 0) -> Estimate | None:
    """``sum(tops) / sum(bottoms)``, with an interval from drawing the pairs anew. None where there is nothing below."""
    top, bottom = np.asarray(tops, float), np.asarray(bottoms, float)
    if not len(top) or bottom.sum() <= 0:
        return None
    generator = np.random.default_rng(seed)
    above, below = np.empty(RESAMPLES), np.empty(RESAMPLES)
    for block in _blocks(len(top)):
        chosen = generator.integers(0, len(top), (block.stop - block.start, len(top)))
        above[block], below[block] = top[chosen].sum(axis=1), bottom[chosen].sum(axis=1)
    drawn = above[below > 0] / below[below > 0]
    return _estimate(float(top.sum() / bottom.sum()), drawn, len(top))


def ratio_of_medians(new: Sequence[Sequence[float]], old: Sequence[Sequence[float]], seed: int = 0) -> Estimate | None:
    """The median of ``new`` over that of ``old``, both in groups, drawn independently."""
    new, old = [group for group in new if group], [group for group in old if group]
    if not new or not old or np.median(np.concatenate(old)) == 0:
        return None
    value = float(np.median(np.concatenate(new)) / np.median(np.concatenate(old)))
    above, below = _draws(new, seed), _draws(old, seed + 1)
    drawn = above[below > 0] / below[below > 0]
    return _estimate(value, drawn, min(len(new), len(old)))


def quantile(values: Sequence[float], share: float) -> float | None:
    """Linear between neighbours; None of nothing."""
    return float(np.quantile(np.asarray(values, float), share)) if len(values) else None


def wilson(successes: int, trials: int) -> Estimate | None:
    """A share with Wilson's score interval, which holds for few trials and near 0 and 1 too."""
    if trials == 0:
        return None
    z = 1.959963984540054
    share = successes / trials
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half), trials)


def _draws(groups: Sequence[Sequence[float]], seed: int) -> np.ndarray:
    """Medians of data drawn anew: groups with repetition, then within each drawn group its values with repetition."""
    generator = np.random.default_rng(seed)
    sizes = np.array([len(group) for group in groups])
    values = np.zeros((len(groups), sizes.max()))
    for row, group in zip(values, groups, strict=True):
        row[: len(group)] = group
    chosen = generator.integers(0, len(groups), (RESAMPLES, len(groups)))
    medians = np.empty(RESAMPLES)
    for block in _blocks(values.size):
        of_drawn = sizes[chosen[block]][:, :, None]
        places = (generator.random((*of_drawn.shape[:2], sizes.max())) * of_drawn).astype(int)
        drawn = values[chosen[block][:, :, None], places]
        if (sizes == sizes[0]).all():
            medians[block] = np.median(drawn.reshape(len(drawn), -1), axis=1)
        else:
            drawn[np.arange(sizes.max()) >= of_drawn] = np.nan
            medians[block] = np.nanmedian(drawn.reshape(len(drawn), -1), axis=1)
    return medians


def _blocks(size: int) -> Iterator[slice]:
    """All resamples of ``size`` values each, in blocks that memory holds; a generator draws the same in any blocks."""
    step = max(1, _MOST_DRAWN // size)
    for start in range(0, RESAMPLES, step):
        yield slice(start, min(start + step, RESAMPLES))


def _estimate(value: float, drawn: np.ndarray, n: int) -> Estimate:
    low, high = np.quantile(drawn, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Estimate(value, float(low), float(high), n)
