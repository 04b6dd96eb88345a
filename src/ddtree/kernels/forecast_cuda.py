"""The forecast of a tree in one launch."""

import torch

from ddtree.kernels.cuda_module import cuda_module
from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.kernels.tree_walk import AcceptedPaths

_CUTS = 8  # that the kernel is compiled for


def forecast(tree: TreeTensors, path: AcceptedPaths, cuts: tuple[int, ...], depths: int) -> torch.Tensor:
    """See `ddtree.kernels.forecast.forecast`; at most 8 cuts, ascending, and at most 63 depths."""
    batch, rows = tree.scores.shape
    told = torch.empty(batch, len(cuts) * (depths + 1), dtype=torch.int64, device=tree.scores.device)
    filled = [*cuts, *[0] * (_CUTS - len(cuts))]
    cuda_module("forecast.cu", told.device).launch(
        "forecast", (batch, 1, 1), 64, 0,
        tree.scores.contiguous(), tree.depths.contiguous(), path.rows.contiguous(), path.accepted, told,
        rows, path.rows.shape[1], len(cuts), depths, *filled,
    )  # fmt: skip
    return told
