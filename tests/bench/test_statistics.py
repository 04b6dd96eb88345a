"""Intervals that hold what they promise, on data whose truth is known."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from scipy.stats import binomtest

from ddtree.bench import statistics
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


@pytest.mark.parametrize("most", [1, 100, 10**9])
def test_blocks_of_any_size_draw_the_same(monkeypatch, most):
    """Resample by resample, a few at a time, or all at once, as it was first written."""
    generator = np.random.default_rng(3)
    even = [list(generator.normal(10, 2, 7)) for _ in range(4)]
    uneven = [list(generator.normal(10, 2, size)) for size in (3, 9, 1)]
    expected = [median_of_groups(even), median_of_groups(uneven), ratio_of_sums(even[0], even[1])]
    monkeypatch.setattr(statistics, "_MOST_DRAWN", most)
    assert [median_of_groups(even), median_of_groups(uneven), ratio_of_sums(even[0], even[1])] == expected


def test_the_memory_of_long_answers_is_bounded():
    """All resamples of these at once would take 400 MB an array."""
    groups = [list(np.random.default_rng(seed).normal(10, 2, 8192)) for seed in range(3)]
    tracemalloc.start()
    try:
        median_of_groups(groups)
        ratio_of_sums([1.0] * 24576, [2.0] * 24576)
        assert tracemalloc.get_traced_memory()[1] < 80e6
    finally:
        tracemalloc.stop()
