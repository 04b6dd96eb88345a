"""From products to rotated queries and written cache slots, one program a head of a row."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl


@triton.jit
def _normed(first, second, weight, half, column, inside, head_dim, eps, dtype: tl.constexpr):
    """Both halves of a head after its norm, rounded as the norm kernel rounds."""
    scale = tl.rsqrt((tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / head_dim + eps)
    first_weight = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    second_weight = tl.load(weight + half + column, mask=inside, other=0.0).to(tl.float32)
    first = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _rotate_and_write_kernel(
    qkv, q_norm, k_norm, cos, sin, cache, slots, query, eps, qkv_stride, layer_stride, cache_stride, slot_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
    NORM_Q: tl.constexpr, NORM_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    layer = tl.program_id(2)
    half: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, BLOCK)
    inside = column < half
    source = qkv + row * qkv_stride + (layer * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    cache += layer.to(tl.int64) * layer_stride
    k_weight = k_norm + layer * HEAD_DIM if NORM_K else k_norm
    dtype: tl.constexpr = qkv.dtype.element_ty
    first = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + column, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + row)
    if head < HEADS:
        if NORM_Q:
            first, second = _normed(first, second, q_norm, half, column, inside, HEAD_DIM, eps, dtype)
        target = query + (row * HEADS + head) * HEAD_DIM
    elif head < HEADS + KV_HEADS:
        if NORM_K:
            first, second = _normed(first, second, k_weight, half, column, inside, HEAD_DIM, eps, dtype)
        target = cache + slot * slot_stride + (head - HEADS) * HEAD_DIM
    else:
        target = cache + cache_stride + slot * slot_stride + (head - HEADS - KV_HEADS) * HEAD_DIM
    if head < HEADS + KV_HEADS:
        c = tl.load(cos + row * half + column, mask=inside, other=0.0)
        s = tl.load(sin + row * half + column, mask=inside, other=0.0)
        first, second = first * c - second * s, second * c + first * s
    tl.store(target + column, first.to(dtype), mask=inside)
    tl.store(target + half + column, second.to(dtype), mask=inside)


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
    _rotate_and_write_kernel[(batch * rows, heads + 2 * kv_heads, layers)](
        qkv, q_norm, k_norms, cos.contiguous(), sin.contiguous(), cache, slots.contiguous(), query, eps,
        qkv.stride(1), cache.stride(0), cache.stride(1), cache.stride(2),
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK=triton.next_power_of_2(head_dim // 2),
        NORM_Q=q_norm is not None, NORM_K=k_norms is not None, num_warps=1,
    )  # fmt: skip
