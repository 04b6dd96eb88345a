"""The batched build and walk against the NumPy oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.kernels.tree_build import build_tree
from ddtree.kernels.tree_build_cuda import build_tree as build_tree_cuda
from ddtree.kernels.tree_tensors import TreeTensors, root_only
from ddtree.kernels.tree_walk import walk_tree
from ddtree.tree import build, walk
from devices import DEVICE, poison_memory


def tables(rng, batch, depths, k, vocab, coarse):
    """Random descending log-probability tables and distinct tokens per depth; `coarse` makes many ties."""
    raw = rng.exponential(size=(batch, depths, k)).astype(np.float32)
    if coarse:
        raw = np.round(raw * 2) / 2
    log_probs = -np.sort(raw, axis=-1)
    tokens = np.stack([[rng.permutation(vocab)[:k] for _ in range(depths)] for _ in range(batch)])
    return log_probs, tokens.astype(np.int64)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 3),
    depths=st.integers(1, 6),
    k=st.integers(1, 6),
    budget=st.sampled_from([1, 2, 3, 7, 8, 9, 16, 33, 64]),
    coarse=st.booleans(),
)
def test_build_tree_equals_the_oracle(seed, batch, depths, k, budget, coarse):
    rng = np.random.default_rng(seed)
    log_probs, tokens = tables(rng, batch, depths, k, 20, coarse)
    if rng.random() < 0.3:
        log_probs[..., -1] = -np.inf
    max_depths = rng.integers(0, depths + 2, size=batch)
    roots = rng.integers(0, 20, size=batch)
    got = build_tree(
        torch.from_numpy(log_probs), torch.from_numpy(tokens), torch.from_numpy(roots), budget,
        torch.from_numpy(max_depths),
    )  # fmt: skip
    assert got.tokens.shape == (batch, budget + 1)
    for b in range(batch):
        expected = build(log_probs[b], tokens[b], budget, int(max_depths[b]))
        tree = got.to_draft_tree(b)
        assert len(tree) == len(expected)
        np.testing.assert_array_equal(tree.token_ids, expected.token_ids)
        np.testing.assert_array_equal(tree.parents, expected.parents)
        np.testing.assert_array_equal(tree.depths, expected.depths)
        np.testing.assert_array_equal(tree.log_scores, expected.log_scores)
        rows = len(expected) + 1
        np.testing.assert_array_equal(got.ancestors[b, :rows, :rows].numpy(), expected.ancestor_mask())
        assert got.tokens[b, 0] == roots[b]
        dead = got.ancestors[b, rows:]
        assert (dead.sum(-1) == 2).all() and dead[:, 0].all(), "a dead row sees the root and itself"
        assert not got.alive[b, rows:].any()


@pytest.mark.parametrize("budget", [255, 1024])
def test_large_budgets(budget):
    rng = np.random.default_rng(budget)
    log_probs, tokens = tables(rng, 2, 15, 64, 500, coarse=False)
    deep = torch.full((2,), 15)
    got = build_tree(torch.from_numpy(log_probs), torch.from_numpy(tokens), torch.zeros(2).long(), budget, deep)
    for b in range(2):
        expected = build(log_probs[b], tokens[b], budget)
        np.testing.assert_array_equal(got.to_draft_tree(b).token_ids, expected.token_ids)
        np.testing.assert_array_equal(got.to_draft_tree(b).parents, expected.parents)


def drafts(kind, rng, depths, k):
    """Log-probabilities float32 ``[depths, k]``, best first, that lead the CUDA kernel one way or another."""
    if kind in ("sharp", "soft"):  # a language model's: a power law, the less peaked the deeper
        peak = (1 + rng.gamma(2.0, 2.0, (depths, 1))) * np.exp(-np.arange(depths)[:, None] / 12)
        logits = (
            -peak * (2 if kind == "sharp" else 1) * np.log(np.arange(1, 2001)) + rng.normal(size=(depths, 2000)) / 2
        )
        log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return -np.sort(-log_probs, axis=1)[:, :k].astype(np.float32)
    if kind == "ties":
        return (-np.sort(np.round(rng.exponential(size=(depths, k)) * 2) / 2, axis=1) - 0.5).astype(np.float32)
    if kind == "tiny":
        return -np.sort(rng.exponential(size=(depths, k)).astype(np.float32) * np.float32(1e-35), axis=1)
    if kind.startswith("steps of "):
        return (-0.01 - np.arange(k) * float(kind[9:]) * np.ones((depths, 1))).astype(np.float32)
    scale = {"near": 1.0, "far": 25.0, "farther": 250.0, "out of reach": 4000.0}[kind]
    return -np.sort(rng.exponential(size=(depths, k)) * scale + scale / 20, axis=1).astype(np.float32)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize(
    ("kind", "depths", "k", "budget"),
    [
        ("sharp", 15, 64, 128), ("sharp", 31, 40, 256), ("sharp", 15, 64, 1024),
        ("soft", 15, 64, 64), ("soft", 15, 64, 128), ("soft", 7, 64, 300), ("soft", 15, 1, 1),
        ("near", 5, 33, 64), ("far", 5, 20, 64), ("farther", 5, 20, 64), ("out of reach", 5, 20, 64),
        ("near", 3, 3, 50), ("far", 2, 4, 20), ("near", 1, 5, 256), ("tiny", 6, 8, 100),
        ("ties", 15, 64, 128), ("ties", 15, 64, 256), ("ties", 15, 64, 512),
        ("steps of 0.37", 15, 2, 128), ("steps of 0.38", 15, 2, 1024), ("steps of 0", 15, 64, 200),
        ("steps of 0.12", 15, 64, 256), ("steps of 0.12", 31, 2, 256),
    ],
)  # fmt: skip
def test_cuda_build_equals_the_oracle(kind, depths, k, budget):
    rng = np.random.default_rng(budget)
    poison_memory()
    log_probs = np.stack([drafts(kind, rng, depths, k) for _ in range(3)])
    tokens = np.stack([[rng.permutation(3000)[:k] for _ in range(depths)] for _ in range(3)])
    roots, max_depths = np.array([5, 6, 7]), np.array([depths, depths - 1, depths + 3])
    inputs = [torch.from_numpy(x).to(DEVICE) for x in (log_probs, tokens, roots, max_depths)]
    got = build_tree_cuda(*inputs[:3], budget, inputs[3])
    got = TreeTensors(got.tokens.cpu(), got.parents.cpu(), got.depths.cpu(), got.scores.cpu(), got.ancestors.cpu())
    for b in range(3):
        expected = build(log_probs[b], tokens[b], budget, int(max_depths[b]))
        tree, rows = got.to_draft_tree(b), len(expected) + 1
        np.testing.assert_array_equal(tree.token_ids, expected.token_ids)
        np.testing.assert_array_equal(tree.parents, expected.parents)
        np.testing.assert_array_equal(tree.depths, expected.depths)
        np.testing.assert_array_equal(tree.log_scores, expected.log_scores)
        np.testing.assert_array_equal(got.ancestors[b, :rows, :rows].numpy(), expected.ancestor_mask())
        assert got.tokens[b, 0] == roots[b]
        assert not got.ancestors[b, :rows, rows:].any()
        dead = got.ancestors[b, rows:]
        assert (dead.sum(-1) == 2).all() and dead[:, 0].all() and not got.alive[b, rows:].any()


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), batch=st.integers(1, 4), budget=st.integers(1, 24))
def test_walk_tree_equals_the_oracle(seed, batch, budget):
    """Also with budget > depth + 1 and batch > 1, where a loop over the wrong extent gave peers a wrong bonus token."""
    rng = np.random.default_rng(seed)
    depths, k = 3, 3
    log_probs, tokens = tables(rng, batch, depths, k, 4, coarse=True)
    tree = build_tree(
        torch.from_numpy(log_probs), torch.from_numpy(tokens), torch.zeros(batch).long(), budget,
        torch.from_numpy(rng.integers(0, depths + 1, size=batch)),
    )  # fmt: skip
    choices = torch.from_numpy(rng.integers(0, 4, size=(batch, budget + 1)))
    got = walk_tree(tree, choices, depths)
    for b in range(batch):
        oracle = tree.to_draft_tree(b)
        expected = walk(oracle, choices[b, : len(oracle) + 1].tolist())
        n = len(expected.path)
        assert int(got.accepted[b]) == n
        assert got.rows[b, : n + 1].tolist() == [0] + [node + 1 for node in expected.path]
        assert got.tokens[b, : n + 1].tolist() == [int(oracle.token_ids[i]) for i in expected.path] + [
            expected.bonus_token
        ]
        assert int(got.roots[b]) == expected.bonus_token


def test_walk_of_roots_alone():
    got = walk_tree(root_only(torch.tensor([3, 4])), torch.tensor([[8], [9]]), 0)
    assert got.rows.tolist() == [[0], [0]]
    assert got.tokens.tolist() == [[8], [9]]
    assert got.accepted.tolist() == [0, 0]


def test_wrong_loop_extent_would_be_seen():
    """The fault of sglang PR 26866, put back: bound the bonus look-up by the budget instead of the depth."""
    log_probs = torch.log_softmax(torch.zeros(2, 2, 4), -1)
    tokens = torch.arange(4).expand(2, 2, 4)
    tree = build_tree(log_probs, tokens, torch.zeros(2).long(), 12, torch.full((2,), 2))
    choices = torch.randint(0, 4, (2, 13), generator=torch.Generator().manual_seed(1))
    right = walk_tree(tree, choices, 2)
    wrong_roots = choices.flatten()[right.accepted]  # a flat index without the sequence's own offset
    assert right.roots.tolist() != wrong_roots.tolist()
    assert right.roots.tolist() == [walk(tree.to_draft_tree(b), choices[b].tolist()).bonus_token for b in range(2)]
