"""What a tree promised: the drafter's probability of accepted nodes, by budget and depth (slow twin)."""

import torch

from ddtree.kernels.tree_tensors import TreeTensors

UNIT = 2**24
"""Probabilities travel as whole numbers of this unit, in one tensor with the tokens."""


def forecast(tree: TreeTensors, cuts: tuple[int, ...], depths: int) -> torch.Tensor:
    """Sums of node probabilities over the best ``cut`` nodes, depth by depth.

    Nodes stand best first, so the first rows of a tree are the tree of a smaller budget.

    Args:
        tree: built trees.
        cuts: budgets to tell about; those above the tree's own repeat its sums.
        depths: depths of a tree.

    Returns:
        int64 ``[batch, len(cuts) * depths]`` in units of ``1 / UNIT``.
    """
    batch, rows = tree.scores.shape
    probabilities = tree.scores[:, 1:].exp()  # 0 for dead rows
    depth = (tree.depths[:, 1:] - 1).clamp_min(0)
    by_depth = torch.zeros(batch, rows - 1, depths, device=depth.device).scatter_(
        2, depth[..., None], probabilities[..., None]
    )
    sums = by_depth.cumsum(1)
    told = torch.stack([sums[:, min(cut, rows - 1) - 1] for cut in cuts], dim=1)
    return (told * UNIT).long().flatten(1)


def read_forecast(numbers: list[int], depths: int) -> list[list[float]]:
    """The sums of one sequence, per cut and depth."""
    return [[n / UNIT for n in numbers[i : i + depths]] for i in range(0, len(numbers), depths)]
