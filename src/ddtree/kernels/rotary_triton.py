"""From products to rotated queries and written cache slots, one program some heads of a row."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl

HEADS_A_PROGRAM = 4


@triton.jit
def _normed(first, second, first_weight, second_weight, head_dim, eps, dtype: tl.constexpr):
    """Both halves of heads after their norm, rounded as the norm kernel rounds."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(squares / head_dim + eps)[:, None]
    first = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _rotate_and_write_kernel(
    qkv, q_norm, k_norm, cos, sin, cache, slots, query, eps, qkv_stride, layer_stride, cache_stride, slot_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    NORM_Q: tl.constexpr, NORM_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(2)
    half: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    inside = (column < half) & (head < HEADS + 2 * KV_HEADS)
    source = qkv + row * qkv_stride + (layer * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM + column
    dtype: tl.constexpr = qkv.dtype.element_ty
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if NORM_Q:
        weight = q_norm + column
        one = tl.load(weight, mask=column < half, other=0.0).to(tl.float32)
        other = tl.load(weight + half, mask=column < half, other=0.0).to(tl.float32)
        first_normed, second_normed = _normed(first, second, one, other, HEAD_DIM, eps, dtype)
        first, second = tl.where(is_query, first_normed, first), tl.where(is_query, second_normed, second)
    if NORM_K:
        weight = k_norm + layer * HEAD_DIM + column
        one = tl.load(weight, mask=column < half, other=0.0).to(tl.float32)
        other = tl.load(weight + half, mask=column < half, other=0.0).to(tl.float32)
        first_normed, second_normed = _normed(first, second, one, other, HEAD_DIM, eps, dtype)
        is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
        first, second = tl.where(is_key, first_normed, first), tl.where(is_key, second_normed, second)
    c = tl.load(cos + row * half + column, mask=column < half, other=0.0)
    s = tl.load(sin + row * half + column, mask=column < half, other=0.0)
    first_turned, second_turned = first * c - second * s, second * c + first * s
    first = tl.where(is_value, first, first_turned).to(dtype)
    second = tl.where(is_value, second, second_turned).to(dtype)
    if HEADS > 0:
        to_query = query + (row * HEADS + head) * HEAD_DIM + column
        tl.store(to_query, first, mask=inside & is_query)
        tl.store(to_query + half, second, mask=inside & is_query)
    slot = tl.load(slots + row)
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
    to_cache = cache + layer.to(tl.int64) * layer_stride + slot * slot_stride + kv_head * HEAD_DIM + column
    to_cache += tl.where(is_value, cache_stride, 0)
    tl.store(to_cache, first, mask=inside & (head >= HEADS))
    tl.store(to_cache + half, second, mask=inside & (head >= HEADS))


def rotate_and_write(
    qkv: torch.Tensor,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """See `ddtree.kernels.rotary.rotate_and_write`; rows of ``qkv`` may lie apart (a slice of a wider product)."""
    batch, rows, width = qkv.shape
    heads = width // head_dim - 2 * cache.shape[2]
    query = qkv.new_empty(batch, rows, heads, head_dim)
    _launch(qkv, q_norm, k_norm, eps, cos, sin, cache[None], slots, query)
    return query


def write_context(
    keys_values: torch.Tensor,
    k_norms: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See `ddtree.kernels.rotary.write_context`; one launch for all layers."""
    no_query = keys_values.new_empty(*keys_values.shape[:2], 0, cache.shape[-1])
    _launch(keys_values, None, k_norms, eps, cos, sin, cache, slots, no_query)


def _launch(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norms: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    query: torch.Tensor,
) -> None:
    """Heads of a row side by side, layer after layer; ``cache`` is ``[layers, 2, slots, kv_heads, head_dim]``."""
    batch, rows, heads, head_dim = query.shape
    layers, kv_heads = cache.shape[0], cache.shape[3]
    if qkv.stride(2) != 1 or qkv.stride(0) != rows * qkv.stride(1):
        qkv = qkv.contiguous()
    all_heads = heads + 2 * kv_heads
    block_heads = min(triton.next_power_of_2(all_heads), HEADS_A_PROGRAM)
    _rotate_and_write_kernel[(batch * rows, triton.cdiv(all_heads, block_heads), layers)](
        qkv, q_norm, k_norms, cos.contiguous(), sin.contiguous(), cache, slots.contiguous(), query, eps,
        qkv.stride(1), cache.stride(0), cache.stride(1), cache.stride(2),
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=block_heads, NORM_Q=q_norm is not None, NORM_K=k_norms is not None,
        num_warps=4 if block_heads == HEADS_A_PROGRAM else 1,
    )  # fmt: skip
