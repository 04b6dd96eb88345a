"""Kernels of a round in SGLang's layouts: masks against the oracle, and every fast kernel against its slow twin."""

import numpy as np
import pytest
import torch

from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.kernels.tree_walk import AcceptedPaths, walk_tree
from ddtree.sglang import commit, round_start, verify_mask
from ddtree.sglang.slot_mover import SlotMover, move_slots_twin
from ddtree.tree import walk
from devices import DEVICE, needs_triton
from random_trees import random_trees


def paths_of(rng: np.random.Generator, tree: TreeTensors, depths: int) -> AcceptedPaths:
    """Walks by choices that often meet a node."""
    lucky = torch.from_numpy(rng.random(tree.tokens.shape) < 0.8)
    child = torch.full_like(tree.tokens, 99)
    for sequence, parents in enumerate(tree.parents.tolist()):
        for row in range(len(parents) - 1, 0, -1):
            if tree.alive[sequence, row]:
                child[sequence, parents[row]] = tree.tokens[sequence, row]
    return walk_tree(tree, torch.where(lucky, child, 98), depths)


def test_masks_and_walks_are_the_oracles_on_1000_trees() -> None:
    rng = np.random.default_rng(5)
    seen = 0
    while seen < 1000:
        batch, budget, depths, k = (int(rng.integers(1, top)) for top in (6, 20, 6, 5))
        tree, oracle = random_trees(rng, batch, budget, depths, k)
        committed = torch.from_numpy(rng.integers(0, 40, batch))
        width = budget + 1
        out = torch.zeros(verify_mask.mask_elements(width, int(committed.sum()), batch) + 7, dtype=torch.bool)
        verify_mask.write_verify_mask(tree.ancestors, committed, out)
        start = 0
        for sequence, (want, length) in enumerate(zip(oracle, committed.tolist(), strict=True)):
            rows = len(want) + 1
            mask = out[start : start + width * (length + width)].view(width, length + width)
            start += mask.numel()
            assert mask[:, :length].all()
            np.testing.assert_array_equal(mask[:rows, length : length + rows].numpy(), want.ancestor_mask())
            assert not mask[:rows, length + rows :].any(), "a node sees a dead row"
            assert mask.diagonal(length).all(), "a row that sees nothing makes NaN"
            choices = rng.integers(0, 50, rows)
            got = walk_tree(tree, torch.from_numpy(np.resize(choices, (batch, width))), depths)
            path = walk(want, np.resize(choices, width)[:rows])
            if batch == 1:
                assert tuple(got.rows[sequence, 1 : len(path.path) + 1].numpy() - 1) == path.path
                assert int(got.roots[sequence]) == path.bonus_token
        assert not out[start:].any()
        seen += batch


def test_a_commit_keeps_the_path_in_order() -> None:
    """Slot by slot: what the accepted rows held stands at the front, everything else stays."""
    rng = np.random.default_rng(6)
    for _ in range(100):
        batch, budget, depths, k = (int(rng.integers(1, top)) for top in (5, 24, 8, 4))
        tree, _ = random_trees(rng, batch, budget, depths, k)
        paths = paths_of(rng, tree, depths)
        width = budget + 1
        slots = torch.from_numpy(rng.permutation(200)[: batch * (width + 3)].reshape(batch, width + 3))
        committed = torch.from_numpy(rng.integers(0, 30, batch))
        if depths + 1 > slots.shape[1]:
            continue
        made = commit.commit_paths(paths, committed, slots, width)
        buffer = torch.arange(200)
        move_slots_twin([buffer], made.source, made.target, made.lengths)
        for sequence in range(batch):
            accepted = int(paths.accepted[sequence])
            assert int(made.lengths[sequence]) == accepted + 1
            rows = paths.rows[sequence, : accepted + 1]
            assert buffer[slots[sequence, : accepted + 1]].tolist() == slots[sequence, rows].tolist()
            steps = slice(sequence * (depths + 1), sequence * (depths + 1) + accepted + 1)
            assert made.rows[steps].tolist() == (rows + sequence * width).tolist()
        assert (made.committed == committed + paths.accepted + 1).all()
        assert (made.positions == committed[:, None] + torch.arange(depths + 1)).all()


class MLATokenToKVPool:
    """As SGLang's of that name: moves what it is told, and knows no lengths."""

    def __init__(self) -> None:
        self.buffer = torch.arange(200)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        self.buffer[tgt_loc] = self.buffer[src_loc]


def test_a_pool_that_is_moved_by_index_moves_the_path_and_nothing_where_lengths_are_0() -> None:
    """Lengths of 0: the greedy tail that is recorded in a graph, switched off for a batch that samples."""
    rng = np.random.default_rng(7)
    tree, _ = random_trees(rng, 3, 12, 5, 4)
    paths = paths_of(rng, tree, 5)
    slots = torch.from_numpy(rng.permutation(200)[: 3 * 13].reshape(3, 13))
    made = commit.commit_paths(paths, torch.tensor([4, 9, 2]), slots, 13)
    assert int(made.lengths.max()) > 2
    pool, want = MLATokenToKVPool(), torch.arange(200)
    SlotMover(pool)(made)
    move_slots_twin([want], made.source, made.target, made.lengths)
    assert torch.equal(pool.buffer, want) and not torch.equal(want, torch.arange(200))
    made.lengths.zero_()
    pool = MLATokenToKVPool()
    SlotMover(pool)(made)
    assert torch.equal(pool.buffer, torch.arange(200))


@needs_triton
@pytest.mark.parametrize("seed", range(6))
def test_fast_kernels_equal_their_twins(seed: int) -> None:
    from ddtree.sglang.commit_triton import commit_paths
    from ddtree.sglang.round_start_triton import start_round
    from ddtree.sglang.slot_move_triton import move_slots
    from ddtree.sglang.verify_mask_triton import write_verify_mask

    rng = np.random.default_rng(seed)
    batch, budget, depths, k = (int(rng.integers(1, top)) for top in (7, 40, 8, 5))
    width, block = budget + 1, depths + 1 + int(rng.integers(0, 3))
    tree, _ = random_trees(rng, batch, budget, depths, k)
    tree = TreeTensors(*(getattr(tree, n).to(DEVICE) for n in ("tokens", "parents", "depths", "scores", "ancestors")))
    committed = torch.from_numpy(rng.integers(0, 1500, batch)).to(DEVICE)
    elements = verify_mask.mask_elements(width, int(committed.sum()), batch)
    want, got = torch.zeros(2, elements + 9, dtype=torch.bool, device=DEVICE)
    verify_mask.write_verify_mask(tree.ancestors, committed, want)
    write_verify_mask(tree.ancestors, committed, got)
    assert torch.equal(got, want)

    slots = max(width, block)
    table = torch.from_numpy(rng.permutation(9 * 1540).reshape(9, 1540).astype(np.int32)).to(DEVICE)
    arguments = (
        tree.tokens[:, 0], committed, torch.from_numpy(rng.permutation(9)[:batch]).to(DEVICE), table, block, slots, 49,
    )  # fmt: skip
    begun, fast = round_start.start_round(*arguments), start_round(*arguments)
    for name in ("block_ids", "block_positions", "slots"):
        assert torch.equal(getattr(begun, name), getattr(fast, name)), name

    paths = paths_of(rng, TreeTensors(*(t.cpu() for t in vars(tree).values())), depths)
    paths = AcceptedPaths(*(t.to(DEVICE) for t in vars(paths).values()))
    made, quick = (f(paths, committed, begun.slots, width) for f in (commit.commit_paths, commit_paths))
    for name, value in vars(made).items():
        assert torch.equal(value, getattr(quick, name)) and value.dtype == getattr(quick, name).dtype, name

    buffers = [torch.from_numpy(rng.normal(size=(9 * 1540, *shape)).astype(np.float32)).to(DEVICE)
               for shape in ((3, 4), (3, 8))]  # fmt: skip
    moved = [buffer.clone() for buffer in buffers]
    move_slots_twin(buffers, made.source, made.target, made.lengths)
    strides = torch.tensor([buffer[0].numel() * 4 for buffer in moved], device=DEVICE)
    pointers = torch.tensor([buffer.data_ptr() for buffer in moved], dtype=torch.uint64, device=DEVICE)
    move_slots(pointers, strides, int(strides.max()), made.source, made.target, made.lengths)
    for a, b in zip(buffers, moved, strict=True):
        assert torch.equal(a, b)
