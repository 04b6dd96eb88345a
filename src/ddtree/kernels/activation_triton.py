"""The gate of the feed-forward block, elementwise over rows and columns."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl


@triton.jit
def _silu_mul_kernel(gate_up, gated, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded after each step, so that the twin's two operations are matched.
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(gated + row * size + column, (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ddtree.kernels.activation.silu_mul`."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    gated = gate_up.new_empty(*gate_up.shape[:-1], size)
    block = min(triton.next_power_of_2(size), 1024)
    _silu_mul_kernel[(gated.numel() // size, triton.cdiv(size, block))](gate_up, gated, size, BLOCK=block, num_warps=4)
    return gated
