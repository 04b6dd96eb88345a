"""A batch of draft trees as tensors of one shape."""

from dataclasses import dataclass
from functools import cache

import torch

from ddtree.tree import DraftTree

DEAD = -torch.inf
"""Score of a row that holds no node, because the tree has fewer nodes than the budget."""


@dataclass(frozen=True)
class TreeTensors:
    """Draft trees of ``batch`` sequences, ``rows = budget + 1`` rows each: row 0 is the root, then nodes, best first.

    Attributes:
        tokens: int64 ``[batch, rows]``; 0 in dead rows.
        parents: int64 ``[batch, rows]``, the parent's row; 0 for the root itself and in dead rows.
        depths: int64 ``[batch, rows]``; 0 for the root and in dead rows.
        scores: float32 ``[batch, rows]``, sums of log-probabilities; 0 for the root, ``DEAD`` in dead rows.
        ancestors: bool ``[batch, rows, rows]``; ``[b, i, j]`` says that row ``j`` is row ``i`` or above it. A dead row
            sees the root and itself.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    scores: torch.Tensor
    ancestors: torch.Tensor

    @property
    def alive(self) -> torch.Tensor:
        """bool ``[batch, rows]``: rows that hold the root or a node."""
        return self.scores > DEAD

    def to_draft_tree(self, sequence: int) -> DraftTree:
        """One tree of the batch as the oracle's type (copies to the host)."""
        n = int(self.alive[sequence].sum()) - 1
        rows = slice(1, n + 1)
        return DraftTree(
            self.tokens[sequence, rows].cpu().numpy(),
            self.parents[sequence, rows].cpu().numpy() - 1,
            self.depths[sequence, rows].cpu().numpy(),
            self.scores[sequence, rows].float().cpu().numpy(),
        )


def root_only(roots: torch.Tensor) -> TreeTensors:
    """Trees without nodes: a round over them is one autoregressive step.

    Args:
        roots: int64 ``[batch]``.
    """
    zeros, scores, ancestors = _of_roots(len(roots), roots.device)
    return TreeTensors(roots[:, None], zeros, zeros, scores, ancestors)


@cache
def _of_roots(batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What trees without nodes have in common, made once: read only."""
    zeros = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    return zeros, zeros.float(), torch.ones(batch, 1, 1, dtype=torch.bool, device=device)


def sees(parents: torch.Tensor, max_depth: int) -> torch.Tensor:
    """Ancestor matrix of trees given by parent rows.

    Args:
        parents: int64 ``[batch, rows]``, row 0 its own parent.
        max_depth: depth of the deepest row.

    Returns:
        bool ``[batch, rows, rows]`` as in `TreeTensors.ancestors`.
    """
    batch, rows = parents.shape
    row = torch.arange(rows, device=parents.device).expand(batch, rows)
    seen = torch.zeros(batch, rows, rows, dtype=torch.bool, device=parents.device)
    for _ in range(max_depth + 1):
        seen.scatter_(2, row[..., None], True)
        row = parents.gather(1, row)
    return seen
