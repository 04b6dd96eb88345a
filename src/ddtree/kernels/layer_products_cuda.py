"""A small model's layer in one launch a product; larger products as streams of weights, or by cuBLAS.

A model of a few hundred million parameters waits for launches and not for its weights, so norm, product and what
follows are one kernel there, which starts to read its weights while the kernel before it still runs. Large products
are bound by their weights: where tiles were measured for them (`wide_tiling`), our kernels read them faster than
cuBLAS does, which makes all others.
"""

from functools import cache

import torch
from torch.nn.functional import linear

from ddtree.kernels.cuda_module import Argument, cuda_module
from ddtree.kernels.product_tiling import MAX_ROWS, Tiling, chip_of, is_measured, tiling
from ddtree.kernels.wide_tiling import CUBLAS, WideTile, streamed_rows, wide_tile

MAX_HIDDEN = 1024
"""Above this hidden size the weights are what takes time."""
MAX_NUMBERS = 32 * 1024
"""Above so many numbers in the stream cuBLAS' larger tiles win, unless tilings were measured for the shape."""
MOST_WIDE_ROWS = 128
"""With 129 rows of Qwen3-8B plain kernels around cuBLAS are 1.6 % faster, with 256 to 2,000 of SmolLM2 3 to 12 %."""
SOURCE = "layer_products.cu"
_WIDE_HEADS = (64, 128, 256)
_KERNELS = ("add_linear", "feed_forward_input", "attend_input")


def is_small(stream: torch.Tensor) -> bool:
    """Whether the rows are those of a small model, in the type that the fused kernels are made for."""
    hidden = stream.shape[-1]
    return stream.dtype == torch.bfloat16 and hidden <= MAX_HIDDEN and stream.numel() <= MAX_ROWS * hidden


def _tiling_for(
    kind: str, stream: torch.Tensor, columns: int, size: int, head_dim: int = 0, whole_heads: bool = False
) -> Tiling | None:
    """The tiling of a product on the rows of ``stream``; None where cuBLAS is to do it."""
    if not is_small(stream) or (stream.numel() > MAX_NUMBERS and not is_measured(kind, columns, size)):
        return None
    rows = stream.numel() // stream.shape[-1]
    return tiling(kind, rows, columns, size, chip_of(stream.device), head_dim, whole_heads)


def _wide_tile_for(kind: str, stream: torch.Tensor, weight: torch.Tensor) -> WideTile | None:
    """How a product of few rows is made for a large model on a Hopper GPU: as measured, else by cuBLAS with kernels
    around it that start early; None on other devices and for more rows, where plain kernels are as fast or faster."""
    rows, hidden = stream.numel() // stream.shape[-1], stream.shape[-1]
    if stream.dtype != torch.bfloat16 or hidden <= MAX_HIDDEN or rows > MOST_WIDE_ROWS:
        return None
    if not (has_wide_tiles(stream.device) and stream.is_contiguous() and weight.is_contiguous()):
        return None
    return wide_tile(kind, rows, *weight.shape) or CUBLAS


@cache
def has_wide_tiles(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU: tiles of large products were measured there, and take its shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def describe(
    hidden: int, middle: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> dict[str, str]:
    """By product, what makes it for the few rows of a step or a round; with more rows cuBLAS does."""
    products = {
        "attend_input": ("attend_input", (heads + 2 * kv_heads) * head_dim, hidden),
        "output": ("add_linear", hidden, heads * head_dim),
        "feed_forward_input": ("feed_forward_input", 2 * middle, hidden),
        "down": ("add_linear", hidden, middle),
    }
    if dtype == torch.bfloat16 and hidden <= MAX_HIDDEN:
        return dict.fromkeys(products, "fused")
    streams = dtype == torch.bfloat16 and has_wide_tiles(device)
    rows = {name: streamed_rows(*product) if streams else [] for name, product in products.items()}
    if head_dim not in _WIDE_HEADS:
        rows["attend_input"] = []
    return {
        name: f"streamed at {', '.join(found)} rows, else cuBLAS" if found else "cuBLAS" for name, found in rows.items()
    }


def defines(kind: str, tiles: Tiling, size: int, head_dim: int = 0) -> dict[str, int]:
    """What is fixed when the kernel is compiled."""
    fixed = {"KERNEL": _KERNELS.index(kind), "K": size, "WARPS": tiles.warps}
    fixed |= {"TILES": tiles.tiles, "ROW_TILES": tiles.row_tiles}
    return fixed | ({"HEAD_DIM": head_dim} if head_dim else {})


def _launch(kind: str, tiles: Tiling, rows: int, columns: int, size: int, head_dim: int, *arguments: Argument) -> None:
    assert isinstance(arguments[0], torch.Tensor)
    module = cuda_module(SOURCE, arguments[0].device, **defines(kind, tiles, size, head_dim))
    grid = (columns // (8 * tiles.tiles), -(-rows // (8 * tiles.row_tiles)), 1)
    module.launch(kind, grid, 32 * tiles.warps, tiles.shared_bytes(size), *arguments, early=True)


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
    """See `ddtree.kernels.layer_products.attend_input`."""
    columns, hidden = weight.shape
    batch, rows, _ = stream.shape
    has_norms = q_norm is not None or k_norm is not None
    tiles = _tiling_for("attend_input", stream, columns, hidden, head_dim, has_norms)
    if tiles is None:
        wide = _wide_tile_for("attend_input", stream, weight)
        if wide is not None and head_dim in _WIDE_HEADS:
            from ddtree.kernels import wide_layer_triton

            return wide_layer_triton.attend_input(
                wide, stream, norm, eps, weight, bias, head_dim, q_norm, k_norm, cos, sin, cache, slots, normed
            )
        from ddtree.kernels.norm_triton import rms_norm
        from ddtree.kernels.rotary_triton import rotate_and_write

        qkv = linear(rms_norm(stream, norm, eps) if normed is None else normed, weight, bias)
        return rotate_and_write(qkv, head_dim, q_norm, k_norm, eps, cos, sin, cache, slots)
    all_slots, kv_heads = cache.shape[1:3]
    heads = columns // head_dim - 2 * kv_heads
    query = stream.new_empty(batch, rows, heads, head_dim)
    _launch(
        "attend_input", tiles, batch * rows, columns, hidden, head_dim,
        stream, norm, weight, bias, q_norm, k_norm, cos.contiguous(), sin.contiguous(), cache, slots.contiguous(),
        query, batch * rows, heads, kv_heads, all_slots, eps,
    )  # fmt: skip
    return query


def feed_forward_input(
    stream: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ddtree.kernels.layer_products.feed_forward_input`."""
    columns, hidden = weight.shape
    batch, rows, _ = stream.shape
    tiles = _tiling_for("feed_forward_input", stream, columns, hidden)
    if tiles is None:
        if (wide := _wide_tile_for("feed_forward_input", stream, weight)) is not None:
            from ddtree.kernels import wide_layer_triton

            return wide_layer_triton.feed_forward_input(wide, stream, norm, eps, weight, bias, normed)
        from ddtree.kernels.activation_triton import silu_mul
        from ddtree.kernels.norm_triton import rms_norm

        return silu_mul(linear(rms_norm(stream, norm, eps) if normed is None else normed, weight, bias))
    gated = stream.new_empty(batch, rows, columns // 2)
    _launch(
        "feed_forward_input", tiles, batch * rows, columns, hidden, 0,
        stream, norm, weight, bias, gated, batch * rows, columns // 2, eps,
    )  # fmt: skip
    return gated


def add_linear(
    stream: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tap: torch.Tensor | None = None,
    next_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor | None:
    """See `ddtree.kernels.layer_products.add_linear`; our large products round once, after the sum."""
    hidden, size = weight.shape
    batch, rows, _ = stream.shape
    tiles = _tiling_for("add_linear", stream, hidden, size)
    if tiles is None:
        if (wide := _wide_tile_for("add_linear", stream, weight)) is not None:
            from ddtree.kernels import wide_layer_triton

            return wide_layer_triton.add_linear(wide, stream, x, weight, bias, tap, next_norm, eps)
        if bias is None:
            stream.view(-1, hidden).addmm_(x.reshape(-1, size), weight.t())
        else:
            stream += linear(x, weight, bias)
        if tap is not None:
            tap.copy_(stream)
        return None
    assert tap is None or tap.stride(0) == rows * tap.stride(1)
    _launch(
        "add_linear", tiles, batch * rows, hidden, size, 0,
        x.contiguous(), weight, bias, stream, tap, batch * rows, hidden, 0 if tap is None else tap.stride(1),
    )  # fmt: skip
    return None
