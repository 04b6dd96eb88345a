"""The tree against brute force: all prefixes listed, sorted by the stated order, the first `budget` taken."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.tree import ROOT, build


@st.composite
def log_prob_tables(draw, max_depths=4, max_width=4):
    """Tables with many equal values, values of 0 and of -inf, rows descending."""
    depths, width = draw(st.integers(1, max_depths)), draw(st.integers(1, max_width))
    value = st.sampled_from([0.0, -0.25, -0.5, -0.5, -1.0, -2.5, -np.inf]) | st.floats(-8, 0, width=32)
    rows = draw(st.lists(st.lists(value, min_size=width, max_size=width), min_size=depths, max_size=depths))
    return np.array([sorted(row, reverse=True) for row in rows], dtype=np.float32)


def token_table(shape):
    """Another token in every cell, so that a token names its depth and rank."""
    return np.arange(shape[0] * shape[1], dtype=np.int64).reshape(shape) + 100


def best_prefixes(log_probs, budget, max_depth):
    """The right answer by definition: every rank tuple with its float32 sum, sorted by score, depth, ranks."""
    listed = []
    for depth in range(1, min(log_probs.shape[0], max_depth) + 1):
        for ranks in itertools.product(range(log_probs.shape[1]), repeat=depth):
            score = np.float32(0)
            for level, rank in enumerate(ranks):
                score = np.float32(score + log_probs[level, rank])
            if score > -np.inf:
                listed.append((-float(score), depth, ranks))
    return sorted(listed)[:budget]


@settings(max_examples=300, deadline=None)
@given(log_prob_tables(), st.integers(0, 40), st.integers(0, 5))
def test_build_takes_the_best_prefixes_in_order(log_probs, budget, max_depth):
    tokens = token_table(log_probs.shape)
    tree = build(log_probs, tokens, budget, max_depth)
    expected = best_prefixes(log_probs, budget, max_depth)
    got = [(-float(tree.log_scores[n]), int(tree.depths[n]), tree.tokens_to(n)) for n in range(len(tree))]
    assert got == [(s, d, [int(tokens[i, r]) for i, r in enumerate(ranks)]) for s, d, ranks in expected]


@settings(max_examples=100, deadline=None)
@given(log_prob_tables(max_depths=5), st.integers(0, 200))
def test_every_node_stands_behind_its_parent(log_probs, budget):
    tree = build(log_probs, token_table(log_probs.shape), budget)
    mask = tree.ancestor_mask()
    for node in range(len(tree)):
        parent = int(tree.parents[node])
        assert parent < node
        row = {0, node + 1} | {a + 1 for a in tree.path(node)}
        assert set(np.flatnonzero(mask[node + 1]).tolist()) == row
    assert mask[0].sum() == 1


def test_one_candidate_per_depth_gives_a_chain():
    log_probs = np.array([[-0.1], [-0.2], [-0.3]], dtype=np.float32)
    tree = build(log_probs, np.array([[7], [8], [9]]), budget=10)
    assert tree.token_ids.tolist() == [7, 8, 9]
    assert tree.parents.tolist() == [ROOT, 0, 1]
    assert tree.depth == 3


def test_budget_above_depth_and_a_full_table():
    rng = np.random.default_rng(0)
    log_probs = -np.sort(rng.exponential(size=(3, 5)).astype(np.float32), axis=1)
    assert len(build(log_probs, token_table((3, 5)), 1024)) == 5 + 25 + 125


def test_equal_scores_prefer_the_shallow_then_the_lower_rank():
    log_probs = np.array([[-1.0, -1.0], [0.0, 0.0]], dtype=np.float32)
    tree = build(log_probs, np.array([[10, 11], [20, 21]]), 6)
    assert [tree.tokens_to(n) for n in range(6)] == [[10], [11], [10, 20], [10, 21], [11, 20], [11, 21]]


@pytest.mark.parametrize(
    "log_probs",
    [[[-0.5, -0.1]], [[0.5, -0.1]], [[np.nan, -1.0]], [-0.5]],
    ids=["ascending", "above zero", "nan", "one axis"],
)
def test_bad_tables_are_refused(log_probs):
    table = np.array(log_probs, dtype=np.float32)
    with pytest.raises(ValueError, match="log_probs"):
        build(table, np.zeros(table.shape, dtype=np.int64), 3)


def test_negative_budget_is_refused():
    with pytest.raises(ValueError, match="budget -1"):
        build(np.zeros((1, 1), dtype=np.float32), np.zeros((1, 1), dtype=np.int64), -1)
