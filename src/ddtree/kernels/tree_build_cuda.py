"""Best-first tree build, the whole of it in one kernel, one block a sequence.

1. A histogram of path costs, convolved depth by depth, gives a score that ``budget`` prefixes are sure to reach: costs
   relative to the greedy path are rounded up to buckets, so the score is a true lower bound of the last node's.
2. One warp collects, breadth first, every prefix that reaches it; there are few more than ``budget`` of them. Meanwhile
   the other warps clear the ancestor matrix.
3. The block sorts them by score, depth and rank tuple and writes the first ``budget``.

Where masses of equal scores overflow step 2, one thread runs the oracle's heap instead: slower, never wrong.
"""

import torch

from ddtree.kernels.cuda_module import cuda_module
from ddtree.kernels.tree_tensors import TreeTensors

MAX_BUDGET, MAX_DEPTHS, MAX_K = 1024, 31, 1024
_CAPACITY = 4096  # as in the source
_HISTOGRAM_RANKS = (
    16,
    32,
)  # ranks that step 1 counts, for budgets up to 256 and above: fewer are faster, more are tighter


def build_tree(
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    roots: torch.Tensor,
    budget: int,
    max_depths: torch.Tensor,
) -> TreeTensors:
    """See `ddtree.kernels.tree_build.build_tree`."""
    batch, depths, k = log_probs.shape
    if not 1 <= budget <= MAX_BUDGET or depths > MAX_DEPTHS or k > MAX_K:
        raise ValueError(f"budget {budget}, {depths} depths, k {k}: at most {MAX_BUDGET}, {MAX_DEPTHS} and {MAX_K}")
    rows = budget + 1
    device = log_probs.device
    tokens, parents, tree_depths = torch.empty(3, batch, rows, dtype=torch.int64, device=device)
    scores = torch.empty(batch, rows, device=device)
    ancestors = torch.empty(batch, rows, rows, dtype=torch.bool, device=device)
    small = budget <= 256
    cuda_module("tree_build.cu", device).launch(
        "build_tree", (batch, 1, 1), 256 if small else 1024, _CAPACITY * 20 + depths * k * 4,
        log_probs.contiguous(), token_ids.contiguous(), roots.contiguous(), max_depths.contiguous(),
        tokens, parents, tree_depths, scores, ancestors, depths, k, budget, _HISTOGRAM_RANKS[not small],
    )  # fmt: skip
    return TreeTensors(tokens, parents, tree_depths, scores, ancestors)
