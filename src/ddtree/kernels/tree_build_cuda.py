"""Best-first tree build, the whole of it in one kernel, one block a sequence.

1. A histogram of path costs, convolved depth by depth by one warp while the others clear the ancestors' matrix, tells
   about what the last of the ``budget`` prefixes scores.
2. Depth by depth, every prefix that scores so much is collected: up to about twice ``budget``. Where the estimate was
   too high and there are fewer, it is lowered and the search begins again.
3. The block sorts them by score, depth and rank tuple, a thread a prefix, and writes the first ``budget``.

Where masses of equal scores overflow step 2, one thread runs the oracle's heap instead: slower, never wrong.
"""

import torch

from ddtree.kernels.cuda_module import cuda_module
from ddtree.kernels.tree_tensors import TreeTensors

MAX_BUDGET, MAX_DEPTHS, MAX_K = 1024, 31, 1024
_CAPACITY, _SMALL_WORDS = 4096, 196  # of shared memory, as in the source


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
    small = budget <= 256  # a large matrix is cleared faster by many blocks
    ancestors = (torch.empty if small else torch.zeros)(batch, rows, rows, dtype=torch.bool, device=device)
    threads, ranks = (512, 32) if small else (1024, 64)  # of a block; of each depth, counted in step 1
    cuda_module("tree_build.cu", device, THREADS=threads, RANKS=ranks).launch(
        "build_tree", (batch, 1, 1), threads, _CAPACITY * 20 + (_SMALL_WORDS + depths * k) * 4,
        log_probs.contiguous(), token_ids.contiguous(), roots.contiguous(), max_depths.contiguous(),
        tokens, parents, tree_depths, scores, ancestors, depths, k, budget, int(small),
    )  # fmt: skip
    return TreeTensors(tokens, parents, tree_depths, scores, ancestors)
