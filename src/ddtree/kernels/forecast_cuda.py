"""The forecast of a tree in one launch."""

import torch

from ddtree.kernels.cuda_module import cuda_module
from ddtree.kernels.tree_tensors import TreeTensors

_CUTS = 8  # that the kernel is compiled for


def forecast(tree: TreeTensors, cuts: tuple[int, ...], depths: int) -> torch.Tensor:
    """See `ddtree.kernels.forecast.forecast`; at most 8 cuts, ascending, and at most 64 depths."""
    batch, rows = tree.scores.shape
    told = torch.empty(batch, len(cuts) * depths, dtype=torch.int64, device=tree.scores.device)
    filled = [min(cut, rows - 1) for cut in cuts] + [0] * (_CUTS - len(cuts))
    cuda_module("forecast.cu", told.device).launch(
        "forecast", (batch, 1, 1), 64, 0,
        tree.scores.contiguous(), tree.depths.contiguous(), told, rows, len(cuts), depths, *filled,
    )  # fmt: skip
    return told
