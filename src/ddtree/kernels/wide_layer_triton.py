"""The products of a large model's layer for few rows, with what stands before and after each of them."""

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from ddtree.kernels import wide_products_cuda, wide_products_triton
from ddtree.kernels import wide_sums_triton as sums
from ddtree.kernels.wide_tiling import WideTile


def _maker(tile: WideTile) -> Callable[..., torch.Tensor]:
    if tile.by == "cublas":
        return _multiply_by_cublas
    return wide_products_cuda.multiply if tile.by == "wgmma" else wide_products_triton.multiply


def _multiply_by_cublas(
    tile: WideTile, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **_: object
) -> torch.Tensor:
    """See `ddtree.kernels.wide_products_triton.multiply`; one stretch, whose sums are rounded."""
    return linear(x, weight)[None]


def _multiply_normed(
    tile: WideTile,
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    normed: torch.Tensor | None,
    gated: bool = False,
) -> torch.Tensor:
    """See `ddtree.kernels.wide_products_triton.multiply`."""
    if tile.by == "rows" and normed is None:
        return wide_products_triton.multiply(tile, x, weight, bias, norm, eps, gated=gated)
    normed = sums.rms_norm(x, norm, eps, tile.early) if normed is None else normed.view(x.shape)
    return _maker(tile)(tile, normed, weight, bias, gated=gated)


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
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ddtree.kernels.layer_products.attend_input`."""
    batch, rows, hidden = stream.shape
    product = _multiply_normed(tile, stream.view(-1, hidden), norm, eps, weight, bias, normed)
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
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ddtree.kernels.layer_products.feed_forward_input`."""
    batch, rows, hidden = stream.shape
    gated = _multiply_normed(tile, stream.view(-1, hidden), norm, eps, weight, bias, normed, gated=True)
    if tile.leaves_sums:
        gated = sums.gate_sums(gated, bias, stream, tile.early)
    return gated.view(batch, rows, -1)


def add_linear(
    tile: WideTile,
    stream: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tap: torch.Tensor | None = None,
    next_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor | None:
    """See `ddtree.kernels.layer_products.add_linear`; rounded once, after the sum, but for cuBLAS' products."""
    batch, rows, hidden = stream.shape
    assert tap is None or tap.stride(0) == rows * tap.stride(1)
    tap = None if tap is None else tap.as_strided((batch * rows, hidden), (tap.stride(1), 1))
    flat = stream.view(-1, hidden)
    x = x.reshape(-1, x.shape[-1]).contiguous()
    product = _maker(tile)(tile, x, weight, bias, stream=flat, tap=tap)
    if not tile.leaves_sums:
        return None
    normed = sums.add_sums(product, bias, flat, tap, next_norm, eps, tile.early)
    return None if normed is None else normed.view(stream.shape)
