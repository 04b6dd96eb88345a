"""Products of large weights with few rows: weights stream through every multiprocessor, rows are read beside them.

A kernel starts while the one before it still runs and then waits for its inputs (programmatic dependent launch). Where
one product has too few columns to occupy the device, its inner axis is cut into stretches that run side by side; the
kernel that follows adds their sums in ascending order. Above 64 rows there are two blocks of rows, the second of 16, 32
or 64.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ddtree.kernels.wide_tiling import WideTile


@triton.jit
def gated_product(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of float32 sums, rounded after each step as the twin rounds."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return ((gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def _finish(
    total, up, bias, stream, out, tap, column, out_place, tap_place, inside,
    COLUMNS: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TAP: tl.constexpr,
):  # fmt: skip
    """From sums to what is stored: bias, gate, residual stream; ``tap`` keeps the new stream as well."""
    if HAS_BIAS:
        total += tl.load(bias + column).to(tl.float32)
        if GATED:
            up += tl.load(bias + COLUMNS // 2 + column).to(tl.float32)
    if ADDS:
        total += tl.load(stream + out_place, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    result = gated_product(total, up, dtype) if GATED else total.to(dtype)
    tl.store(out + out_place, result, mask=inside)
    if HAS_TAP:
        tl.store(tap + tap_place, result, mask=inside)


@triton.jit
def _multiply(x, w, acc, W_FIRST: tl.constexpr):
    """Tensor cores take 64 rows of their first operand: with 64 rows of ``x`` those may come first."""
    if W_FIRST:
        acc = tl.dot(w, x.T, acc)
    else:
        acc = tl.dot(x, w.T, acc)
    return acc


@triton.jit
def _put(
    total, up, bias, stream, out, tap, rows, tap_stride, first_row,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr,
    ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TAP: tl.constexpr, W_FIRST: tl.constexpr,
):  # fmt: skip
    """One block of rows, from ``first_row`` on: its sums as they are, or finished."""
    middle: tl.constexpr = COLUMNS // 2
    width: tl.constexpr = middle if GATED else COLUMNS
    row, n = first_row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    column = tl.program_id(0) * BLOCK_N + n
    if W_FIRST:
        column, row, inside = column[:, None], row[None, :], (row < rows)[None, :] & (n < BLOCK_N)[:, None]
    else:
        column, row, inside = column[None, :], row[:, None], (row < rows)[:, None] & (n < BLOCK_N)[None, :]
    place = row * width + column
    if SPLITS > 1:
        tl.store(out + tl.program_id(1) * rows * COLUMNS + place, total, mask=inside)
    else:
        _finish(
            total, up, bias, stream, out, tap, column, place, row * tap_stride + column, inside,
            COLUMNS, GATED, ADDS, HAS_BIAS, HAS_TAP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x, more_x, weight, bias, stream, out, tap, rows, tap_stride,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr, SPLIT_SIZE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, MORE_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TAP: tl.constexpr,
    W_FIRST: tl.constexpr, EARLY: tl.constexpr, CALLS_LATE: tl.constexpr,
):  # fmt: skip
    """``x``, ``more_x`` (rows from BLOCK_M on, where there are any) and ``weight`` are descriptors: tiles are copied by
    the copy engine, rows that are not there as zeros."""
    middle: tl.constexpr = COLUMNS // 2
    more_rows: tl.constexpr = MORE_M if MORE_M > 0 else 16
    first_column, first = tl.program_id(0) * BLOCK_N, tl.program_id(1) * SPLIT_SIZE
    if EARLY:
        if not CALLS_LATE:
            gdc_launch_dependents()
        gdc_wait()
    if W_FIRST:
        acc, up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32), tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        acc_more, up_more = tl.zeros((BLOCK_N, more_rows), tl.float32), tl.zeros((BLOCK_N, more_rows), tl.float32)
    else:
        acc, up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc_more, up_more = tl.zeros((more_rows, BLOCK_N), tl.float32), tl.zeros((more_rows, BLOCK_N), tl.float32)
    for at in range(first, tl.minimum(first + SPLIT_SIZE, SIZE), BLOCK_K):
        a = x.load([0, at])
        w = weight.load([first_column, at])
        acc = _multiply(a, w, acc, W_FIRST)
        if MORE_M > 0:
            b = more_x.load([BLOCK_M, at])
            acc_more = _multiply(b, w, acc_more, W_FIRST)
        if GATED:
            w_up = weight.load([middle + first_column, at])
            up = _multiply(a, w_up, up, W_FIRST)
            if MORE_M > 0:
                up_more = _multiply(b, w_up, up_more, W_FIRST)
    if EARLY and CALLS_LATE:
        gdc_launch_dependents()
    _put(
        acc, up, bias, stream, out, tap, rows, tap_stride, 0,
        COLUMNS, SPLITS, BLOCK_M, BLOCK_N, GATED, ADDS, HAS_BIAS, HAS_TAP, W_FIRST,
    )  # fmt: skip
    if MORE_M > 0:
        _put(
            acc_more, up_more, bias, stream, out, tap, rows, tap_stride, BLOCK_M,
            COLUMNS, SPLITS, MORE_M, BLOCK_N, GATED, ADDS, HAS_BIAS, HAS_TAP, W_FIRST,
        )  # fmt: skip


@triton.jit
def _products(w, x, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Of each weight row with ``x``, 8 neighbours added up: those that one thread holds."""
    return tl.sum((w.to(tl.float32) * x[None, :]).reshape(BLOCK_N, BLOCK_K // 8, 8), axis=2)


@triton.jit
def _row_kernel(
    x, norm, eps, weight, bias, stream, out, tap,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TAP: tl.constexpr,
    EARLY: tl.constexpr, CALLS_LATE: tl.constexpr,
):  # fmt: skip
    """One row; its norm is made again in every program, which reads it whole anyway."""
    middle: tl.constexpr = COLUMNS // 2
    column, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if EARLY and not CALLS_LATE:
        gdc_launch_dependents()
    dtype: tl.constexpr = weight.dtype.element_ty
    own = weight + column[:, None] * SIZE + k[None, :]
    # The first step's weights are asked for before the wait.
    w = tl.load(own, eviction_policy="evict_first")
    w_up = tl.load(own + middle * SIZE, eviction_policy="evict_first") if GATED else w
    if EARLY:
        gdc_wait()
    scale = 1.0
    if NORMED:
        squares = tl.zeros((BLOCK_K,), tl.float32)
        for at in range(0, SIZE, BLOCK_K):
            value = tl.load(x + at + k).to(tl.float32)
            squares += value * value
        scale = tl.rsqrt(tl.sum(squares, axis=0) / SIZE + eps)
    acc, up = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32), tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    for at in range(0, SIZE, BLOCK_K):
        # The next step's weights are on their way while this one's are multiplied.
        is_there = at + BLOCK_K + k[None, :] + 0 * column[:, None] < SIZE
        next_w = tl.load(own + at + BLOCK_K, mask=is_there, other=0.0, eviction_policy="evict_first")
        if GATED:
            next_up = tl.load(
                own + middle * SIZE + at + BLOCK_K, mask=is_there, other=0.0, eviction_policy="evict_first"
            )
        value = tl.load(x + at + k).to(tl.float32)
        if NORMED:
            value = (value * scale).to(dtype).to(tl.float32) * tl.load(norm + at + k).to(tl.float32)
            value = value.to(dtype).to(tl.float32)
        acc += _products(w, value, BLOCK_N, BLOCK_K)
        w = next_w
        if GATED:
            up += _products(w_up, value, BLOCK_N, BLOCK_K)
            w_up = next_up
    if EARLY and CALLS_LATE:
        gdc_launch_dependents()
    _finish(
        tl.sum(acc, axis=1), tl.sum(up, axis=1), bias, stream, out, tap, column, column, column, column >= 0,
        COLUMNS, GATED, ADDS, HAS_BIAS, HAS_TAP,
    )  # fmt: skip


def rows_of_tile(rows: int) -> tuple[int, int]:
    """Rows of the tile that holds ``rows``: of its first block and of its second, 0 where one is enough."""
    if rows <= 64:
        return max(16, triton.next_power_of_2(rows)), 0
    return 64, max(16, triton.next_power_of_2(rows - 64))


def multiply(
    tile: WideTile,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    stream: torch.Tensor | None = None,
    tap: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """``x`` times the transposed ``weight``: the finished result, or the sums of each stretch where there are several.

    Args:
        tile: one by Triton or by rows that fits; see `WideTile.fits`.
        x: contiguous ``[rows, size]``.
        weight, bias: contiguous ``[columns, size]`` and its first axis.
        norm, eps: ``[size]``; of tiles by rows alone, which norm ``x`` themselves.
        stream, tap: ``[rows, columns]``; the product is added to ``stream`` and kept in ``tap`` as well.
        gated: silu of the first half of the columns, times the second half.

    Returns:
        ``[rows, columns]`` (half as many where gated; ``stream`` where there is one); with several stretches float32
        ``[splits, rows, columns]``, without bias, gate and stream.
    """
    (rows, size), columns = x.shape, weight.shape[0]
    split, out = tile.leaves_sums, tile.empty_result(x, columns, stream, gated)
    gated, adds, biased = gated and not split, stream is not None and not split, bias is not None and not split
    tapped = tap is not None and not split
    own = tile.columns // 2 if gated else tile.columns
    programs = columns // tile.columns
    stretch = triton.cdiv(size // tile.depth, tile.splits) * tile.depth
    fixed = {"COLUMNS": columns, "SIZE": size, "BLOCK_N": own, "BLOCK_K": tile.depth, "GATED": gated, "ADDS": adds}
    fixed |= {"HAS_BIAS": biased, "HAS_TAP": tapped, "EARLY": tile.early, "CALLS_LATE": tile.calls_late}
    options = {"num_warps": tile.warps, "num_stages": tile.stages} | ({"launch_pdl": True} if tile.early else {})
    if tile.by == "rows":
        _row_kernel[(programs,)](
            x, norm, eps, weight, bias, stream, out, tap, NORMED=norm is not None, **fixed, **options
        )
        return out
    block_rows, more_rows = rows_of_tile(rows)
    x_tiles = TensorDescriptor.from_tensor(x, [block_rows, tile.depth])
    more_tiles = TensorDescriptor.from_tensor(x, [more_rows, tile.depth]) if more_rows else None
    weight_tiles = TensorDescriptor.from_tensor(weight, [own, tile.depth])
    _product_kernel[(programs, tile.splits)](
        x_tiles, more_tiles, weight_tiles, bias, stream, out, tap, rows, 0 if tap is None else tap.stride(0),
        SPLIT_SIZE=stretch, SPLITS=tile.splits, BLOCK_M=block_rows, MORE_M=more_rows,
        W_FIRST=block_rows < 64 or more_rows > 0, **fixed, **options,
    )  # fmt: skip
    return out
