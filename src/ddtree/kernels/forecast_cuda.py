"""The forecast of a tree in one launch, which also puts it behind what the host is told anyway."""

import torch

from ddtree.kernels.cuda_module import cuda_module
from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.kernels.tree_walk import AcceptedPaths

_CUTS, _WARP = 8, 32  # as the kernel has them


def forecast(
    tree: TreeTensors, path: AcceptedPaths, packed: torch.Tensor, cuts: tuple[int, ...], depths: int
) -> torch.Tensor:
    """See `ddtree.kernels.forecast.forecast`; at most 8 cuts, ascending, up to 1,024, and at most 63 depths."""
    batch, rows = tree.scores.shape
    columns = len(cuts) * (depths + 1)
    told = torch.empty(batch, packed.shape[1] + columns, dtype=torch.int64, device=tree.scores.device)
    filled = [*cuts, *[0] * (_CUTS - len(cuts))]
    cuda_module("forecast.cu", told.device).launch(
        "forecast", (batch, 1, 1), -(-columns // _WARP) * _WARP, 0,
        tree.scores.contiguous(), tree.depths.contiguous(), path.rows.contiguous(), path.accepted,
        packed.contiguous(), told, rows, path.rows.shape[1], packed.shape[1], len(cuts), depths, *filled,
    )  # fmt: skip
    return told
