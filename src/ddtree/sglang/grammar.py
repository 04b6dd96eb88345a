"""Grammars over a tree, in SGLang 0.5.17 and later: which token each row may be followed by.

SGLang walks a grammar's state down the tree on the host, row by row, while the target verifies. Its answer masks the
logits of every row, so the walk takes only what the grammar allows, as plain decoding would.
"""

from collections.abc import Callable
from typing import Any

import torch

from ddtree.kernels.tree_tensors import TreeTensors

NONE = -1


def links(tree: TreeTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of every row, as SGLang's traversal wants a tree.

    Returns:
        two int64 ``[batch, rows]``, rows of the same sequence, `NONE` where there is none; dead rows hang nowhere.
    """
    rows = tree.tokens.shape[1]
    row = torch.arange(rows, device=tree.tokens.device)
    is_node = tree.alive & (row > 0)
    is_child = (tree.parents[:, None, :] == row[:, None]) & is_node[:, None, :]
    first_child = torch.where(is_child, row, rows).amin(2)
    is_sibling = (tree.parents[:, :, None] == tree.parents[:, None, :]) & is_node[:, :, None] & is_node[:, None, :]
    next_sibling = torch.where(is_sibling & (row > row[:, None]), row, rows).amin(2)
    return first_child.where(first_child < rows, NONE), next_sibling.where(next_sibling < rows, NONE)


class GrammarRound:
    """The masks of one round: begun before the verify pass, so that its copies to the host run ahead of it.

    Args:
        batch: SGLang's, some of whose requests have a grammar.
        tree: the trees that are verified.
    """

    def __init__(self, batch: Any, tree: TreeTensors) -> None:
        from sglang.srt.speculative.spec_utils import GrammarTree

        self._batch = batch
        self._tree = GrammarTree.from_device(*links(tree), tree.tokens)

    def mask(self, logits: torch.Tensor, barrier: Callable[[], None] | None) -> None:
        """Take from ``logits``, in place, what the grammars forbid.

        Args:
            logits: ``[batch * rows, vocab]``.
            barrier: brings the grammars to where the last round ended; None where they are there already.
        """
        from sglang.srt.speculative.spec_utils import build_grammar_vocab_mask

        mask = build_grammar_vocab_mask(
            reqs=self._batch.reqs, tree=self._tree, sampling_info=self._batch.sampling_info, device=logits.device,
            barrier=barrier,
        )  # fmt: skip
        if mask is not None:
            mask.apply(logits)
