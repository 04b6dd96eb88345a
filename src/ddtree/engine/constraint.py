"""Rules for the text of an answer, such as a grammar: which tokens may stand after each row of a tree.

Such rules live on the host, so that a round has to stop for them between the build of the tree and the choice of the
tokens. These split rounds are batched apart from the others.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree.kernels.tree_tensors import TreeTensors


class Constraint(Protocol):
    """What one sequence may say, kept in step with what it said.

    Attributes:
        is_complete: nothing more may follow.
    """

    is_complete: bool

    def allowed(self, tokens: Seq[int], parents: Seq[int]) -> NDArray[np.int32]:
        """Which tokens may follow each row of a tree.

        Args:
            tokens: the rows' tokens; row 0 is the root, which `advance` has seen already.
            parents: the rows' parents, each before its children; 0 for the root itself.

        Returns:
            bits ``[rows, ceil(vocab / 32)]``, lowest token in the lowest bit; rows out of reach hold anything.
        """
        ...

    def advance(self, token: int) -> None:
        """A token was committed."""
        ...


class TreeOnHost:
    """The trees of a batch, copied to the host; made before the target runs, so that it waits for the build alone."""

    def __init__(self, tree: TreeTensors) -> None:
        packed = torch.stack((tree.tokens, tree.parents, tree.alive.long()))
        self._tokens, self._parents, self._alive = packed.cpu().numpy()
        self._device = tree.tokens.device

    def allowed(self, constraints: Seq[Constraint], vocab_size: int) -> torch.Tensor:
        """bool ``[batch, rows, vocab_size]``: tokens that may follow each row."""
        batch, rows = self._tokens.shape
        bits = np.full((batch, rows, -(-vocab_size // 32)), -1, dtype=np.int32)
        for row, constraint in enumerate(constraints):
            alive = int(self._alive[row].sum())
            bits[row, :alive] = constraint.allowed(
                self._tokens[row, :alive].tolist(), self._parents[row, :alive].tolist()
            )
        on_device = torch.from_numpy(bits).to(self._device)
        places = torch.arange(32, dtype=torch.int32, device=self._device)
        return ((on_device[..., None] >> places) & 1).bool().flatten(2)[..., :vocab_size]
