"""The target's choice in exact mode: as the fast one, with running sums that are a function of their row alone."""

import torch

from ddtree.kernels import choose_cuda
from ddtree.kernels.choose import SamplingTensors
from ddtree.kernels.exact_sum_triton import running_sum
from ddtree.kernels.tree_tensors import TreeTensors


def choose(
    logits: torch.Tensor,
    sampling: SamplingTensors | None,
    tree: TreeTensors,
    committed: torch.Tensor,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ddtree.kernels.choose.choose`."""
    return choose_cuda.choose(logits, sampling, tree, committed, allowed, running_sum)
