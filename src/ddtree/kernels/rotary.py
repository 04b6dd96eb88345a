"""From products to rotated queries and written cache slots (slow twins)."""

import torch

from ddtree.kernels.norm import rms_norm


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head (the half-split order of Hugging Face checkpoints).

    Args:
        x: ``[batch, rows, heads, head_dim]``.
        cos, sin: float32 ``[batch, rows, head_dim / 2]``.
    """
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


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
    """Norm heads where the family does, rotate queries and keys, write keys and values to their slots.

    Args:
        qkv: ``[batch, rows, (heads + 2 * kv_heads) * head_dim]``, queries first; without queries (``heads`` = 0) only
            keys and values are written.
        q_norm, k_norm: ``[head_dim]`` weights, or None where heads are not normed.
        cos, sin: float32 ``[batch, rows, head_dim / 2]``.
        cache: one layer, ``[2, slots, kv_heads, head_dim]``.
        slots: int64 ``[batch, rows]``; slots of the trash page drop the row.

    Returns:
        rotated queries ``[batch, rows, heads, head_dim]``.
    """
    kv_heads = cache.shape[2]
    heads = qkv.view(*qkv.shape[:2], -1, head_dim)
    query, key, value = heads.split((heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads), dim=2)
    if k_norm is not None:
        key = rms_norm(key, k_norm, eps)
    if q_norm is not None and query.shape[2]:
        query = rms_norm(query, q_norm, eps)
    cache[0, slots] = rotate(key, cos, sin)
    cache[1, slots] = value
    return rotate(query, cos, sin) if query.shape[2] else query


def write_context(
    keys_values: torch.Tensor,
    k_norms: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write the keys and values of all layers, as when target taps are injected into the drafter.

    Args:
        keys_values: ``[batch, rows, layers * 2 * kv_heads * head_dim]``, layer after layer, keys first.
        k_norms: ``[layers, head_dim]`` weights, or None where heads are not normed.
        cache: ``[layers, 2, slots, kv_heads, head_dim]``.
        cos, sin, slots: as in `rotate_and_write`.
    """
    for i, layer in enumerate(keys_values.chunk(cache.shape[0], dim=-1)):
        k_norm = None if k_norms is None else k_norms[i]
        rotate_and_write(layer, cache.shape[-1], None, k_norm, eps, cos, sin, cache[i], slots)
