"""Attention over pages and a tree against a loop over every query, written from the definition."""

import pytest
import torch

from ddtree.kernels.paged import move_rows, slots_of
from ddtree.kernels.tree_attention import TreeAttention
from ddtree.kernels.tree_build import build_tree

PAGE, HEADS, KV_HEADS, DIM = 4, 6, 2, 8


def attend_by_definition(query, keys, values, visible):
    """softmax(q k / sqrt(d)) v in float64, one query at a time; `visible` lists (key, value) slots."""
    out = torch.zeros(HEADS, DIM, dtype=torch.float64)
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        k, v = keys[visible, kv].double(), values[visible, kv].double()
        weights = (k @ query[head].double() / DIM**0.5).softmax(0)
        out[head] = weights @ v
    return out.flatten()


def scene(lengths, budget=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    log_probs = torch.randn(batch, 3, 4, generator=generator).log_softmax(-1).sort(descending=True).values
    tokens = torch.arange(4).expand(batch, 3, 4)
    tree = build_tree(log_probs, tokens, torch.zeros(batch).long(), budget, torch.full((batch,), 3))
    pages = -(-(max(lengths) + budget + 1) // PAGE)
    shuffled = torch.randperm(batch * pages, generator=generator) + 1
    table = shuffled.view(batch, pages)
    cache = torch.randn(2, (batch * pages + 1) * PAGE, KV_HEADS, DIM, generator=generator)
    query = torch.randn(batch, budget + 1, HEADS, DIM, generator=generator)
    return tree, table, torch.tensor(lengths), cache, query


@pytest.mark.parametrize("lengths", [[0], [5], [23], [7, 1, 18]], ids=str)
@pytest.mark.parametrize("context_window", [None, 1, 6, 100])
@pytest.mark.parametrize("sliding_window", [None, 1, 3, 9])
def test_equals_the_definition(lengths, context_window, sliding_window):
    tree, table, committed, cache, query = scene(lengths)
    bound = max(lengths)
    attention = TreeAttention(table, committed, tree.depths, tree.ancestors, PAGE, bound, context_window, torch.float32)
    got = attention(query, cache[0], cache[1], sliding_window)
    for b, length in enumerate(lengths):
        for row in range(query.shape[1]):
            position = length + int(tree.depths[b, row])
            context = [p for p in range(length) if context_window is None or p >= length - context_window]
            rows = [r for r in range(query.shape[1]) if tree.ancestors[b, row, r]]
            keys = [(p, p) for p in context] + [(length + r, length + int(tree.depths[b, r])) for r in rows]
            if sliding_window is not None:
                keys = [(place, at) for place, at in keys if position - at < sliding_window]
            visible = [int(table[b, place // PAGE]) * PAGE + place % PAGE for place, _ in keys]
            expected = attend_by_definition(query[b, row], cache[0], cache[1], visible)
            torch.testing.assert_close(got[b, row].double(), expected, rtol=1e-5, atol=1e-5)


def test_neighbouring_pages_are_read_in_place_with_the_same_result():
    tree, _, committed, cache, query = scene([9])
    pages = cache.shape[1] // PAGE - 1
    straight = torch.arange(1, pages + 1)[None]
    shuffled = torch.cat((straight[:, :1], straight[:, 1:].flip(1)), 1)
    moved = cache.view(2, -1, PAGE, KV_HEADS, DIM).clone()
    moved[:, shuffled[0]] = cache.view(2, -1, PAGE, KV_HEADS, DIM)[:, straight[0]]
    moved = moved.view_as(cache)

    def attend(table, pool):
        attention = TreeAttention(table, committed, tree.depths, tree.ancestors, PAGE, 9, None, torch.float32)
        return attention(query, pool[0], pool[1], None), attention

    in_place, run = attend(straight, cache)
    gathered, scattered = attend(shuffled, moved)
    assert run._run is not None and scattered._run is None
    torch.testing.assert_close(in_place, gathered, rtol=1e-6, atol=1e-6)


def test_slots_follow_the_block_table():
    table = torch.tensor([[5, 2, 9], [1, 7, 0]])
    positions = torch.tensor([[0, 3, 4, 11], [1, 4, 7, 8]])
    assert slots_of(table, positions, PAGE).tolist() == [[20, 23, 8, 39], [5, 28, 31, 0]]


def test_move_rows_reads_before_it_writes():
    cache = torch.arange(12.0).view(1, 1, 12, 1, 1).repeat(2, 2, 1, 1, 1)
    move_rows(cache, torch.tensor([6, 7, 5]), torch.tensor([5, 6, 0]))
    assert cache[1, 1, :, 0, 0].tolist() == [5, 1, 2, 3, 4, 6, 7, 7, 8, 9, 10, 11]
