"""What stands between the products of a large model's layer: norms, and the sums of split products with what follows.

Stretches are added in ascending order. All kernels start while the one before them still runs, and then wait for it.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ddtree.kernels.rotary_triton import _normed
from ddtree.kernels.wide_products_triton import gated_product

_BLOCK = 512
_HEADS = 4


@triton.jit
def _norm(value, by, eps, SIZE: tl.constexpr, dtype: tl.constexpr):
    """A row normed and scaled ``by`` the weight; rounded before it is scaled, as the twin rounds."""
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    return ((value * scale).to(dtype).to(tl.float32) * by).to(dtype)


@triton.jit
def _norm_kernel(x, weight, normed, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    if EARLY:
        gdc_launch_dependents()
    by = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    value = tl.load(x + tl.program_id(0) * SIZE + column, mask=inside, other=0.0)
    result = _norm(value, by, eps, SIZE, normed.dtype.element_ty)
    tl.store(normed + tl.program_id(0) * SIZE + column, result, mask=inside)


@triton.jit
def _add_up(sums, place, inside, plane, SPLITS: tl.constexpr):
    total = tl.load(sums + place, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(sums + split * plane + place, mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["rows"])
def _add_kernel(
    sums, bias, stream, tap, norm, normed, rows, tap_stride, eps, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TAP: tl.constexpr, NORMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Where it norms as well, a program has a whole row."""
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    if EARLY:
        gdc_launch_dependents()
    if NORMS:
        by = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    place = row * COLUMNS + column
    before = tl.load(stream + place, mask=inside, other=0.0).to(tl.float32)
    total = _add_up(sums, place, inside, rows * COLUMNS, SPLITS)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    result = (total + before).to(stream.dtype.element_ty)
    tl.store(stream + place, result, mask=inside)
    if HAS_TAP:
        tl.store(tap + row * tap_stride + column, result, mask=inside)
    if NORMS:
        tl.store(normed + place, _norm(result, by, eps, COLUMNS, normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gate_kernel(
    sums, bias, gated, rows, MIDDLE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < MIDDLE
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    place, plane = row * 2 * MIDDLE + column, rows * 2 * MIDDLE
    gate = _add_up(sums, place, inside, plane, SPLITS)
    up = _add_up(sums, place + MIDDLE, inside, plane, SPLITS)
    if HAS_BIAS:
        gate += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + MIDDLE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(gated + row * MIDDLE + column, gated_product(gate, up, gated.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _rotate_kernel(
    sums, bias, q_norm, k_norm, cos, sin, cache, slots, query, eps, rows, cache_stride, slot_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    NORM_Q: tl.constexpr, NORM_K: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, half = tl.program_id(0), HEAD_DIM // 2
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, HEAD_DIM // 2)[None, :]
    is_query, is_value, inside = head < HEADS, head >= HEADS + KV_HEADS, (head < all_heads) & (d < half)
    dtype: tl.constexpr = query.dtype.element_ty
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    c, s = tl.load(cos + row * half + d), tl.load(sin + row * half + d)
    slot = tl.load(slots + row)
    at = head * HEAD_DIM + d
    place, plane = row * all_heads * HEAD_DIM + at, rows * all_heads * HEAD_DIM
    first = _add_up(sums, place, inside, plane, SPLITS)
    second = _add_up(sums, place + half, inside, plane, SPLITS)
    if HAS_BIAS:
        first += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(bias + at + half, mask=inside, other=0.0).to(tl.float32)
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    if NORM_Q:
        one, other = tl.load(q_norm + d).to(tl.float32), tl.load(q_norm + half + d).to(tl.float32)
        one, other = _normed(first, second, one, other, HEAD_DIM, eps, dtype)
        first, second = tl.where(is_query, one, first), tl.where(is_query, other, second)
    if NORM_K:
        one, other = tl.load(k_norm + d).to(tl.float32), tl.load(k_norm + half + d).to(tl.float32)
        one, other = _normed(first, second, one, other, HEAD_DIM, eps, dtype)
        is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
        first, second = tl.where(is_key, one, first), tl.where(is_key, other, second)
    first_turned, second_turned = first * c - second * s, second * c + first * s
    first = tl.where(is_value, first, first_turned).to(dtype)
    second = tl.where(is_value, second, second_turned).to(dtype)
    to_query = query + (row * HEADS + head) * HEAD_DIM + d
    tl.store(to_query, first, mask=inside & is_query)
    tl.store(to_query + half, second, mask=inside & is_query)
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
    to_cache = cache + slot * slot_stride + kv_head * HEAD_DIM + d + tl.where(is_value, cache_stride, 0)
    tl.store(to_cache, first, mask=inside & (head >= HEADS))
    tl.store(to_cache + half, second, mask=inside & (head >= HEADS))


def _row_warps(block: int) -> int:
    """Of a program with so many numbers of a row."""
    return min(max(block // 512, 1), 16)


def _options(early: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if early else {}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, early: bool = True) -> torch.Tensor:
    """See `ddtree.kernels.norm.rms_norm`; ``x`` is contiguous ``[rows, size]``."""
    rows, size = x.shape
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _norm_kernel[(rows,)](
        x, weight, normed, eps, SIZE=size, BLOCK=block, EARLY=early, num_warps=_row_warps(block),
        **_options(early),
    )  # fmt: skip
    return normed


def add_sums(
    sums: torch.Tensor,
    bias: torch.Tensor | None,
    stream: torch.Tensor,
    tap: torch.Tensor | None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    early: bool = True,
) -> torch.Tensor | None:
    """``stream`` (contiguous ``[rows, columns]``) plus ``sums`` (float32, ``[splits, rows, columns]``), in place.

    Returns:
        the new stream after the norm of this weight, where there is one.
    """
    splits, rows, columns = sums.shape
    normed = None if norm is None else torch.empty_like(stream)
    block = _BLOCK if norm is None else triton.next_power_of_2(columns)
    _add_kernel[(rows, triton.cdiv(columns, block))](
        sums, bias, stream, tap, norm, normed, rows, 0 if tap is None else tap.stride(0), eps, COLUMNS=columns,
        BLOCK=block, SPLITS=splits, HAS_BIAS=bias is not None, HAS_TAP=tap is not None, NORMS=norm is not None,
        EARLY=early, num_warps=2 if norm is None else _row_warps(block), **_options(early),
    )  # fmt: skip
    return normed


def gate_sums(sums: torch.Tensor, bias: torch.Tensor | None, like: torch.Tensor, early: bool = True) -> torch.Tensor:
    """silu(gate) * up, ``[rows, middle]`` in the type of ``like``, of float32 ``[splits, rows, 2 * middle]``."""
    splits, rows, columns = sums.shape
    gated = like.new_empty(rows, columns // 2)
    _gate_kernel[(rows, triton.cdiv(columns // 2, _BLOCK))](
        sums, bias, gated, rows, MIDDLE=columns // 2, BLOCK=_BLOCK, SPLITS=splits, HAS_BIAS=bias is not None,
        EARLY=early, num_warps=2, **_options(early),
    )  # fmt: skip
    return gated


def rotate_sums(
    sums: torch.Tensor,
    bias: torch.Tensor | None,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    early: bool = True,
) -> torch.Tensor:
    """See `ddtree.kernels.rotary.rotate_and_write`, of ``[splits, rows, columns]``; ``[rows, heads, head_dim]``."""
    splits, rows, columns = sums.shape
    kv_heads = cache.shape[2]
    heads = columns // head_dim - 2 * kv_heads
    query = cache.new_empty(rows, heads, head_dim)
    _rotate_kernel[(rows, triton.cdiv(columns // head_dim, _HEADS))](
        sums, bias, q_norm, k_norm, cos.contiguous(), sin.contiguous(), cache, slots.contiguous(), query, eps, rows,
        cache.stride(0), cache.stride(1), HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK=_HEADS,
        SPLITS=splits, NORM_Q=q_norm is not None, NORM_K=k_norm is not None, HAS_BIAS=bias is not None, EARLY=early,
        num_warps=4, **_options(early),
    )  # fmt: skip
    return query
