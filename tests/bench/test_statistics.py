"""Intervals that hold what they promise, on data whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from ddtree.bench.statistics import median_of_groups, ratio_of_medians, ratio_of_sums, wilson


@pytest.mark.parametrize(("passed", "trials"), [(0, 4), (4, 4), (3, 10), (50, 120), (119, 120)])
def test_wilson_is_the_textbook_interval(passed, trials):
    expected = binomtest(passed, trials).proportion_ci(method="wilson")
    found = wilson(passed, trials)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert found.value == passed / trials


def test_nothing_has_no_estimate():
    assert wilson(0, 0) is None
    assert median_of_groups([[], []]) is None
    assert ratio_of_sums([], []) is None and ratio_of_sums([1.0], [0.0]) is None
    assert ratio_of_medians([[1.0]], [[]]) is None


def test_the_interval_covers_the_truth():
    """Repetitions that differ among themselves: counting every request as independent would cover far too rarely."""
    generator = np.random.default_rng(1)
    hits = 0
    for seed in range(60):
        groups = [list(generator.normal(100 + generator.normal(0, 5), 2, 12)) for _ in range(10)]
        found = median_of_groups(groups, seed)
        hits += found.low <= 100 <= found.high
        assert found.n == 10
    assert hits >= 50, f"95 % intervals held the truth {hits} times of 60"


def test_a_ratio_weighs_by_what_is_below():
    found = ratio_of_sums([10.0, 2.0], [2.0, 1.0])
    assert found.value == 4.0 and found.low < 4.0 < found.high


def test_a_ratio_of_medians():
    generator = np.random.default_rng(2)
    old = [list(generator.normal(100, 3, 20)) for _ in range(8)]
    new = [list(generator.normal(90, 3, 20)) for _ in range(8)]
    found = ratio_of_medians(new, old)
    assert found.value == pytest.approx(0.9, abs=0.02) and found.high < 0.95
    same = ratio_of_medians(old, old)
    assert same.value == 1.0 and same.low < 1 < same.high


def test_the_same_data_give_the_same_interval():
    groups = [[1.0, 2.0, 5.0], [2.0, 3.0, 9.0]]
    assert median_of_groups(groups) == median_of_groups(groups)
