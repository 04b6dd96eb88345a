"""Links of a tree as SGLang's grammars walk it, with SGLang's own traversal where its sources are at hand."""

import ast
from typing import Any

import numpy as np
import pytest
import torch

from ddtree.kernels.tree_build import build_tree
from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.sglang.grammar import NONE, links
from sglang_sources import sglang_source


def random_tree(seed: int, budget: int = 14, depths: int = 5, k: int = 4, batch: int = 3) -> TreeTensors:
    torch.manual_seed(seed)
    log_probs = (2 * torch.randn(batch, depths, k)).log_softmax(-1).sort(-1, descending=True).values
    ids = torch.stack([torch.stack([torch.randperm(40)[:k] for _ in range(depths)]) for _ in range(batch)])
    return build_tree(log_probs, ids, torch.arange(batch), budget, torch.tensor([depths, 1, 0])[:batch])


@pytest.mark.parametrize("seed", range(20))
def test_links_lead_to_every_live_row_once_and_down_the_right_parent(seed: int) -> None:
    tree = random_tree(seed)
    first_child, next_sibling = links(tree)
    for sequence in range(len(tree.tokens)):
        met: dict[int, int] = {}
        above = [0]
        while above:
            parent = above.pop()
            row = int(first_child[sequence, parent])
            while row != NONE:
                assert row not in met
                met[row] = parent
                above.append(row)
                row = int(next_sibling[sequence, row])
        alive = [row for row in range(1, tree.tokens.shape[1]) if tree.alive[sequence, row]]
        assert met == {row: int(tree.parents[sequence, row]) for row in alive}
        dead = [row for row in range(tree.tokens.shape[1]) if not tree.alive[sequence, row]]
        assert (first_child[sequence, dead] == NONE).all() and (next_sibling[sequence, dead] == NONE).all()
        assert int(next_sibling[sequence, 0]) == NONE


class EvenThenOdd:
    """A grammar of even and odd tokens in turn, told as SGLang's grammars are; ends after six tokens."""

    def __init__(self) -> None:
        self.taken = [1]

    def accept_token(self, token: int) -> None:
        assert self.allows(token)
        self.taken.append(token)

    def allows(self, token: int) -> bool:
        return token % 2 != self.taken[-1] % 2

    def rollback(self, count: int) -> None:
        del self.taken[-count:]

    def is_terminated(self) -> bool:
        return len(self.taken) > 6

    def fill_vocab_mask(self, mask: torch.Tensor, row: int) -> None:
        words = np.zeros(mask.shape[1], dtype=np.uint32)
        for token in range(40):
            words[token // 32] |= np.uint32(self.allows(token)) << np.uint32(token % 32)
        mask[row] = torch.from_numpy(words.view(np.int32))


@pytest.fixture(scope="module")
def traverse_tree() -> Any:
    """SGLang 0.5.17's own function, out of its source: the module around it needs a GPU's packages."""
    source = (sglang_source("0.5.17") / "sglang/srt/speculative/spec_utils.py").read_text()
    (function,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "traverse_tree")
    found: dict[str, Any] = {"torch": torch, "Optional": None, "BaseGrammarObject": object}
    exec("from __future__ import annotations\n" + ast.unparse(function), found)
    return found["traverse_tree"]


def test_sglangs_walk_masks_every_row_that_the_grammar_can_reach(traverse_tree: Any) -> None:
    reached = 0
    for seed in range(30):
        tree = random_tree(seed, batch=1)
        first_child, next_sibling = links(tree)
        grammar, masks = EvenThenOdd(), torch.full((tree.tokens.shape[1], 2), -1, dtype=torch.int32)
        traverse_tree(first_child[0], next_sibling[0], tree.tokens[0], grammar, masks, 40)
        assert grammar.taken == [1], "rolled back"
        for row in range(tree.tokens.shape[1]):
            path = [int(tree.tokens[0, i]) for i in range(1, row + 1) if tree.ancestors[0, row, i]]
            allowed = all(token % 2 != before % 2 for before, token in zip([1, *path], path, strict=False))
            if not allowed or not tree.alive[0, row]:
                assert (masks[row] == -1).all(), "no walk gets there, so it needs no mask"
                continue
            reached += 1
            assert masks[row, 0] & 0b11 == (0b01 if [1, *path][-1] % 2 else 0b10)
    assert reached > 40
