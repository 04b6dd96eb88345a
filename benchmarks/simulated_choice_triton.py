"""The simulated choice of `shapes.simulated_choice` in one launch, so that simulating takes no time that counts."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl

from ddtree.kernels.tree_tensors import TreeTensors


@triton.jit
def _kernel(real, tokens, parents, depths, scores, choices, rows, vocab, accepted, BLOCK: tl.constexpr):
    row, first = tl.program_id(0), tl.program_id(1) * rows
    other = tl.arange(0, BLOCK)
    inside = (other > 0) & (other < rows)
    is_child = inside & (tl.load(parents + first + other, mask=inside, other=-1) == row)
    is_child &= tl.load(scores + first + other, mask=inside, other=0.0) > float("-inf")
    best = tl.min(tl.where(is_child, other, BLOCK), axis=0)
    follows = (best < BLOCK) & (tl.load(depths + first + row) < accepted)
    token = tl.load(tokens + first + best, mask=follows, other=0)
    wrong = (tl.load(real + first + row) + 1) % vocab
    tl.store(choices + first + row, tl.where(follows, token, wrong))


def simulate(real: torch.Tensor, tree: TreeTensors, accepted: int, vocab: int) -> torch.Tensor:
    """int64 ``[batch, rows]``: a row's best child above depth ``accepted``, else what is sure to fail."""
    batch, rows = tree.tokens.shape
    choices = torch.empty_like(tree.tokens)
    _kernel[(rows, batch)](
        real, tree.tokens, tree.parents, tree.depths, tree.scores, choices, rows, vocab, accepted,
        BLOCK=triton.next_power_of_2(rows), num_warps=1,
    )  # fmt: skip
    return choices
