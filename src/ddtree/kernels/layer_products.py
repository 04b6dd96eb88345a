"""The matrix products of a decoder layer with what stands before and after each of them (slow twins)."""

import torch
from torch.nn.functional import linear

from ddtree.kernels.activation import silu_mul
from ddtree.kernels.norm import rms_norm
from ddtree.kernels.rotary import rotate_and_write


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
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """From the residual stream to rotated queries and written cache slots.

    Args:
        stream: ``[batch, rows, hidden]``.
        norm: ``[hidden]``, the weight of the norm before the product; ``eps`` is that of all norms.
        weight, bias: ``[(heads + 2 * kv_heads) * head_dim, hidden]`` and its first axis, queries first.
        head_dim, q_norm, k_norm, cos, sin, cache, slots: see `ddtree.kernels.rotary.rotate_and_write`.
        normed: ``stream`` after the norm where `add_linear` has made that already.

    Returns:
        rotated queries ``[batch, rows, heads, head_dim]``.
    """
    qkv = linear(rms_norm(stream, norm, eps), weight, bias)
    return rotate_and_write(qkv, head_dim, q_norm, k_norm, eps, cos, sin, cache, slots)


def feed_forward_input(
    stream: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """From the residual stream to the gated middle of the feed-forward block.

    Args:
        stream: ``[batch, rows, hidden]``.
        norm: ``[hidden]``.
        weight, bias: ``[2 * middle, hidden]`` and its first axis, gate first.
        normed: ``stream`` after the norm where `add_linear` has made that already.

    Returns:
        ``[batch, rows, middle]``.
    """
    return silu_mul(linear(rms_norm(stream, norm, eps), weight, bias))


def add_linear(
    stream: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tap: torch.Tensor | None = None,
    next_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor | None:
    """Add a product to the residual stream, in place.

    Args:
        stream: ``[batch, rows, hidden]``.
        x: ``[batch, rows, size]``.
        weight, bias: ``[hidden, size]`` and its first axis.
        tap: ``[batch, rows, hidden]``, perhaps a slice of a wider tensor; the new stream is kept there as well.
        next_norm, eps: ``[hidden]``, the weight of the norm that the stream goes through next.

    Returns:
        the new stream after that norm where it came with the sum, else None.
    """
    stream += linear(x, weight, bias)
    if tap is not None:
        tap.copy_(stream)
    return None
