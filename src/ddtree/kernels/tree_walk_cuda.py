"""Walking a batch of trees by the target's choices, one block a sequence."""

import torch

from ddtree.kernels.cuda_module import cuda_module
from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.kernels.tree_walk import AcceptedPaths


def walk_tree(tree: TreeTensors, choices: torch.Tensor, depths: int) -> AcceptedPaths:
    """See `ddtree.kernels.tree_walk.walk_tree`."""
    batch, rows = choices.shape
    device = choices.device
    path, tokens = torch.empty(2, batch, depths + 1, dtype=torch.int64, device=device)
    accepted, roots = torch.empty(2, batch, dtype=torch.int64, device=device)
    cuda_module("tree_walk.cu", device).launch(
        "walk_tree", (batch, 1, 1), min(-(-rows // 32) * 32, 1024), rows * 8,
        tree.tokens.contiguous(), tree.parents.contiguous(), tree.scores.contiguous(), choices.contiguous(),
        path, accepted, tokens, roots, rows, depths,
    )  # fmt: skip
    return AcceptedPaths(path, accepted, tokens, roots)
