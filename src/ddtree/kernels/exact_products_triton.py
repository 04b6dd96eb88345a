"""Products of exact mode: a row's result is a function of that row and of the weights, however many rows there are.

One tile of fixed shape does all the work. The weights' inner axis is cut into stretches whose number follows from the
weights' shape alone; each stretch is summed from zero, and the sums are added in ascending order, by a second kernel
where few rows leave the device room to run the stretches side by side, else by the same program: the same additions.
Tiles of 64 rows make an autoregressive step compute 63 rows for nothing, which hides behind the weights' way from
memory, and let a tree of 64 nodes read the weights twice, the second time from the cache of the device.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ddtree.kernels.activation_triton import silu_mul
from ddtree.kernels.norm_triton import rms_norm
from ddtree.kernels.rotary_triton import rotate_and_write

PROGRAMS = 264
"""Cut the inner axis until there are about so many programs for one tile of rows."""
MAX_SPLITS = 8
MAX_PARALLEL_ROWS = 256
"""With more rows the stretches are no longer run side by side, which would take memory."""


@dataclass(frozen=True)
class Tile:
    """Shape of the tile that one program computes, and how much of the inner axis it takes at a time."""

    rows: int
    columns: int
    depth: int
    stages: int


def tile_for(dtype: torch.dtype, columns: int) -> Tile:
    """The tile for weights of so many columns."""
    if dtype == torch.float32:
        return Tile(16, 32, 32, 2)
    return Tile(64, 64 if columns >= 4096 else 32, 64, 4)


def splits_for(tile: Tile, columns: int, size: int) -> tuple[int, int]:
    """Into how many stretches the inner axis is cut, and how many numbers each has."""
    steps = triton.cdiv(size, tile.depth)
    wanted = triton.cdiv(PROGRAMS, triton.cdiv(columns, tile.columns))
    a_split = triton.cdiv(steps, max(1, min(wanted, MAX_SPLITS, steps // 2)))
    return triton.cdiv(steps, a_split), a_split * tile.depth


@triton.jit
def _finish(total, bias, stream, out, column, place, inside, is_column, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr):
    """Bias, residual stream, one rounding."""
    if HAS_BIAS:
        total = total + tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    if ADDS:
        total = total + tl.load(stream + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x, weight, bias, stream, out, partial, rows, columns, size, split_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    PARALLEL: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row, is_column = row < rows, column < columns
    x_tile = x + row[:, None] * size + k[None, :]
    weight_tile = weight + column[None, :] * size + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first, last = 0, SPLITS
    if PARALLEL:
        first = tl.program_id(2)
        last = first + 1
    for split in range(first, last):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for at in range(split * split_size, tl.minimum((split + 1) * split_size, size), BLOCK_K):
            if EVEN:
                a = tl.load(x_tile + at, mask=is_row[:, None], other=0.0)
                b = tl.load(weight_tile + at, mask=is_column[None, :], other=0.0)
            else:
                inside = at + k < size
                a = tl.load(x_tile + at, mask=is_row[:, None] & inside[None, :], other=0.0)
                b = tl.load(weight_tile + at, mask=is_column[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        total = total + acc
    place = row[:, None] * columns + column[None, :]
    inside = is_row[:, None] & is_column[None, :]
    if PARALLEL:
        plane = tl.program_id(2).to(tl.int64) * rows * columns
        tl.store(partial + plane + place, total, mask=inside)
    else:
        _finish(total, bias, stream, out, column[None, :], place, inside, is_column[None, :], HAS_BIAS, ADDS)


@triton.jit(do_not_specialize=["rows"])
def _add_up_kernel(
    partial, bias, stream, out, rows, columns,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = tl.program_id(0).to(tl.int64) * columns + column
    plane = rows.to(tl.int64) * columns
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        total = total + tl.load(partial + split * plane + place, mask=inside, other=0.0)
    _finish(total, bias, stream, out, column, place, inside, inside, HAS_BIAS, ADDS)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stream: torch.Tensor | None = None
) -> torch.Tensor:
    """``x`` times the transposed ``weight``, summed in float32 and rounded once.

    Args:
        x: ``[..., size]``.
        weight, bias: ``[columns, size]`` and its first axis.
        stream: contiguous ``[..., columns]``; the product is added to it in place instead of being returned anew.
    """
    columns, size = weight.shape
    flat = x.reshape(-1, size).contiguous()
    weight = weight.contiguous()
    rows = flat.shape[0]
    out = x.new_empty(*x.shape[:-1], columns) if stream is None else stream
    tile = tile_for(x.dtype, columns)
    splits, split_size = splits_for(tile, columns, size)
    is_parallel = splits > 1 and rows <= MAX_PARALLEL_ROWS
    partial = torch.empty(splits * rows * columns, device=x.device) if is_parallel else out
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns), splits if is_parallel else 1)
    _product_kernel[grid](
        flat, weight, bias, stream, out, partial, rows, columns, size, split_size,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, SPLITS=splits, PARALLEL=is_parallel,
        HAS_BIAS=bias is not None, ADDS=stream is not None, EVEN=size % tile.depth == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if is_parallel:
        block = min(triton.next_power_of_2(columns), 512)
        _add_up_kernel[(rows, triton.cdiv(columns, block))](
            partial, bias, stream, out, rows, columns, BLOCK=block, SPLITS=splits, HAS_BIAS=bias is not None,
            ADDS=stream is not None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def attend_input(
    stream: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    normed: None = None,
) -> torch.Tensor:
    """See `ddtree.kernels.layer_products.attend_input`."""
    qkv = linear(rms_norm(stream, norm, eps), weight, bias)
    return rotate_and_write(qkv, head_dim, q_norm, k_norm, eps, cos, sin, cache, slots)


def feed_forward_input(
    stream: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    normed: None = None,
) -> torch.Tensor:
    """See `ddtree.kernels.layer_products.feed_forward_input`."""
    return silu_mul(linear(rms_norm(stream, norm, eps), weight, bias))


def add_linear(
    stream: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tap: torch.Tensor | None = None,
    next_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """See `ddtree.kernels.layer_products.add_linear`; rounded once, after the sum; norms are left to what follows."""
    linear(x, weight, bias, stream)
    if tap is not None:
        tap.copy_(stream)
