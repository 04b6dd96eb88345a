"""Root mean square normalisation, one program a row."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl


@triton.jit
def _norm_kernel(x, residual, weight, normed, total, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * size + column, mask=inside, other=0.0)
    dtype = value.dtype
    if ADD:
        value = (value.to(tl.float32) + tl.load(residual + row * size + column, mask=inside, other=0.0)).to(dtype)
        tl.store(total + row * size + column, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    # Rounded before it is scaled, as Hugging Face does.
    scaled = (wide * scale).to(dtype).to(tl.float32) * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * size + column, scaled.to(dtype), mask=inside)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[-1]
    x = x.contiguous()
    normed = torch.empty_like(x)
    add = residual is not None
    total = torch.empty_like(x) if add else x
    block = triton.next_power_of_2(size)
    _norm_kernel[(x.numel() // size,)](
        x, residual.contiguous() if residual is not None else x, weight, normed, total, size, eps,
        ADD=add, BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip
    return normed, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ddtree.kernels.norm.rms_norm`."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ddtree.kernels.norm.add_rms_norm`."""
    return _launch(x, residual, weight, eps)
