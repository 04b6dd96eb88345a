"""Running sums, one program a row. torch's take another way through one row than through many, and round otherwise."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl


@triton.jit
def _running_sum_kernel(x, sums, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    before = tl.zeros((1,), tl.float32)
    for at in range(0, size, BLOCK):
        inside = at + column < size
        value = tl.load(x + row + at + column, mask=inside, other=0.0)
        tl.store(sums + row + at + column, before + tl.cumsum(value, axis=0), mask=inside)
        before = before + tl.sum(value, axis=0)


def running_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums of float32 ``[..., size]`` up to and including each number of the last axis."""
    x = x.contiguous()
    sums = torch.empty_like(x)
    _running_sum_kernel[(x.numel() // x.shape[-1],)](x, sums, x.shape[-1], BLOCK=2048, num_warps=8)
    return sums
