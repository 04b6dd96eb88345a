"""The products of a large model's layer for few rows, with what stands before and after each of them."""

import torch

from ddtree.kernels import wide_sums_triton as sums
from ddtree.kernels.wide_products_triton import multiply
from ddtree.kernels.wide_tiling import WideTile


def attend_input(
    tile: WideTile,
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
) -> torch.Tensor:
    """See `ddtree.kernels.layer_products.attend_input`."""
    batch, rows, hidden = stream.shape
    x = stream.view(-1, hidden)
    if tile.by_rows:
        product = multiply(tile, x, weight, bias, norm, eps)
    else:
        product = multiply(tile, sums.rms_norm(x, norm, eps, tile.early), weight, bias)
    if product.dim() == 2:
        product, bias = product[None], None  # there is nothing to be added any more
    query = sums.rotate_sums(product, bias, head_dim, q_norm, k_norm, eps, cos, sin, cache, slots, tile.early)
    return query.view(batch, rows, *query.shape[1:])


def feed_forward_input(
    tile: WideTile,
    stream: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """See `ddtree.kernels.layer_products.feed_forward_input`."""
    batch, rows, hidden = stream.shape
    x = stream.view(-1, hidden)
    if tile.by_rows:
        gated = multiply(tile, x, weight, bias, norm, eps, gated=True)
    else:
        gated = multiply(tile, sums.rms_norm(x, norm, eps, tile.early), weight, bias, gated=True)
        if tile.splits > 1:
            gated = sums.gate_sums(gated, bias, stream, tile.early)
    return gated.view(batch, rows, -1)


def add_linear(
    tile: WideTile,
    stream: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tap: torch.Tensor | None = None,
) -> None:
    """See `ddtree.kernels.layer_products.add_linear`; rounded once, after the sum."""
    batch, rows, hidden = stream.shape
    assert tap is None or tap.stride(0) == rows * tap.stride(1)
    tap = None if tap is None else tap.as_strided((batch * rows, hidden), (tap.stride(1), 1))
    flat = stream.view(-1, hidden)
    x = x.reshape(-1, x.shape[-1]).contiguous()
    product = multiply(tile, x, weight, bias, stream=flat, tap=tap)
    if tile.splits > 1:
        sums.add_sums(product, bias, flat, tap, tile.early)
