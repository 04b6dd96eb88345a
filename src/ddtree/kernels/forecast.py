"""What a tree promised and what it held, by budget (slow twin)."""

from dataclasses import dataclass

import numpy as np
import torch

from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.kernels.tree_walk import AcceptedPaths

UNIT = 2**24
"""Probabilities travel as whole numbers of this unit, in one tensor with the tokens."""


@dataclass(frozen=True)
class Forecast:
    """A round of some sequences, seen as the round of each smaller budget.

    Attributes:
        masses: float64 ``[batch, cuts, depths]``, the drafter's probability that a node of that depth is accepted.
        held: int64 ``[batch, cuts]``, accepted nodes that the smaller tree would have had as well.
    """

    masses: np.ndarray
    held: np.ndarray


def forecast(
    tree: TreeTensors, path: AcceptedPaths, packed: torch.Tensor, cuts: tuple[int, ...], depths: int
) -> torch.Tensor:
    """Sums of node probabilities over the best ``cut`` nodes, depth by depth, and how many of these were accepted.

    Nodes stand best first, so the first rows of a tree are the tree of a smaller budget, and what the target accepted
    of them is what it would have accepted of that one.

    Args:
        tree: built trees.
        path: what the target accepted.
        packed: int64 ``[batch, n]``, what the host is told anyway.
        cuts: budgets to tell about; those above the tree's own repeat its sums.
        depths: depths of a tree.

    Returns:
        int64 ``[batch, n + len(cuts) * (depths + 1)]``: ``packed``, then for each cut the sums in units of
        ``1 / UNIT`` and the count.
    """
    batch, rows = tree.scores.shape
    probabilities = tree.scores[:, 1:].exp()  # 0 for dead rows
    depth = (tree.depths[:, 1:] - 1).clamp_min(0)
    by_depth = torch.zeros(batch, rows - 1, depths, device=depth.device).scatter_(
        2, depth[..., None], probabilities[..., None]
    )
    sums = by_depth.cumsum(1)
    step = torch.arange(1, path.rows.shape[1], device=path.rows.device)
    accepted = step <= path.accepted[:, None]
    told = [packed]
    for cut in cuts:
        held = (accepted & (path.rows[:, 1:] <= cut)).sum(1, keepdim=True)
        told += [(sums[:, min(cut, rows - 1) - 1] * UNIT).long(), held]
    return torch.cat(told, dim=1)


def read_forecast(numbers: np.ndarray, depths: int) -> Forecast:
    """What `forecast` told, on the host."""
    table = numbers.reshape(len(numbers), -1, depths + 1)
    return Forecast(table[..., :depths] / UNIT, table[..., depths])
