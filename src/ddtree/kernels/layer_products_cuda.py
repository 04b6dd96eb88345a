"""A small model's layer in one launch a product; larger products as cuBLAS and small kernels.

A model of a few hundred million parameters waits for launches and not for its weights, so norm, product and what
follows are one kernel there, which starts to read its weights while the kernel before it still runs. Large products
are bound by their weights, which cuBLAS reads about as fast as memory gives them.
"""

from dataclasses import dataclass
from functools import cache as remember

import torch
from torch.nn.functional import linear

from ddtree.kernels.cuda_module import Argument, cuda_module

MAX_ROWS = 136
"""Above so many rows cuBLAS' larger tiles win."""
MAX_HIDDEN = 1024
"""Above this hidden size the weights are what takes time."""
SOURCE = "layer_products.cu"
_KERNELS = ("add_linear", "feed_forward_input", "attend_input")
_PROCESSORS = 132
_MAX_WARPS = 16
_MAX_REGISTERS = 72  # of a thread, for its inputs
_MAX_SHARED_BYTES = 200 * 1024


@dataclass(frozen=True)
class Tiling:
    """How a product is cut into blocks.

    Attributes:
        tiles: tiles of 8 weight rows a block takes.
        row_tiles: tiles of 8 input rows a block takes.
        warps: warps of a block; they split the product's inner axis.
    """

    tiles: int
    row_tiles: int
    warps: int

    def shared_bytes(self, size: int) -> int:
        """For a product over ``size``: the warps' sums, sums of squares, weights of the norm and of the product."""
        pieces = self.warps * -(-(size // 32) // self.warps)
        sums = 4 * self.warps * 8 * self.row_tiles * (8 * self.tiles + 1)
        return sums + 2 * size + 64 * pieces * 8 * self.tiles


def warps_for(size: int) -> int:
    """Warps that split an inner axis of ``size``: a function of it alone, so that sums do not depend on the rows."""
    pieces = size // 32
    each = -(-pieces // _MAX_WARPS)
    return -(-pieces // each)


def tilings(
    kind: str, rows: int, columns: int, size: int, head_dim: int = 0, whole_heads: bool = False
) -> list[Tiling]:
    """All tilings that a product can have.

    Args:
        kind: the kernel's name.
        rows, columns, size: of the product.
        whole_heads: a block takes all columns of a head.
    """
    warps = warps_for(size)
    each = -(-(size // 32) // warps)
    found = []
    for tiles in (head_dim // 8,) if whole_heads else (1, 2, 3, 4, 6, 8):
        if columns % (8 * tiles) or (kind == "feed_forward_input" and columns // 2 % (4 * tiles)):
            continue
        if kind == "attend_input" and head_dim % (8 * tiles):
            continue
        for row_tiles in range(1, min(-(-rows // 8), 8) + 1):
            pairs = 8 * row_tiles * 4 * tiles // (1 if kind == "add_linear" else 2)  # each is one thread's
            one = Tiling(tiles, row_tiles, warps)
            fits = 4 * row_tiles * each <= _MAX_REGISTERS and one.shared_bytes(size) <= _MAX_SHARED_BYTES
            if pairs <= 32 * warps and fits:
                found.append(one)
    return found


@remember
def tiling(
    kind: str, rows: int, columns: int, size: int, head_dim: int = 0, whole_heads: bool = False
) -> Tiling | None:
    """The tiling that makes the busiest multiprocessor read least, if there is any; see `tilings`."""

    def cost(one: Tiling) -> int:
        blocks = columns // (8 * one.tiles) * -(-rows // (8 * one.row_tiles))
        # Weights are read ahead, so they count half; a block costs about as much as 12 rows.
        return -(-blocks // _PROCESSORS) * (min(8 * one.row_tiles, rows) + 4 * one.tiles + 12)

    return min(tilings(kind, rows, columns, size, head_dim, whole_heads), key=cost, default=None)


def is_small(stream: torch.Tensor) -> bool:
    """Whether the rows are those of a small model, in the type that the fused kernels are made for."""
    hidden = stream.shape[-1]
    return stream.dtype == torch.bfloat16 and hidden <= MAX_HIDDEN and stream.numel() <= MAX_ROWS * hidden


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
) -> torch.Tensor:
    """See `ddtree.kernels.layer_products.attend_input`."""
    columns, hidden = weight.shape
    batch, rows, _ = stream.shape
    has_norms = q_norm is not None or k_norm is not None
    tiles = tiling("attend_input", batch * rows, columns, hidden, head_dim, has_norms) if is_small(stream) else None
    if tiles is None:
        from ddtree.kernels.norm_triton import rms_norm
        from ddtree.kernels.rotary_triton import rotate_and_write

        qkv = linear(rms_norm(stream, norm, eps), weight, bias)
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
    stream: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """See `ddtree.kernels.layer_products.feed_forward_input`."""
    columns, hidden = weight.shape
    batch, rows, _ = stream.shape
    tiles = tiling("feed_forward_input", batch * rows, columns, hidden) if is_small(stream) else None
    if tiles is None:
        from ddtree.kernels.activation_triton import silu_mul
        from ddtree.kernels.norm_triton import rms_norm

        return silu_mul(linear(rms_norm(stream, norm, eps), weight, bias))
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
) -> None:
    """See `ddtree.kernels.layer_products.add_linear`; large products round once, after the sum."""
    hidden, size = weight.shape
    batch, rows, _ = stream.shape
    tiles = tiling("add_linear", batch * rows, hidden, size) if is_small(stream) else None
    if tiles is None:
        if bias is None:
            stream.view(-1, hidden).addmm_(x.reshape(-1, size), weight.t())
        else:
            stream += linear(x, weight, bias)
        if tap is not None:
            tap.copy_(stream)
        return
    assert tap is None or tap.stride(0) == rows * tap.stride(1)
    _launch(
        "add_linear", tiles, batch * rows, hidden, size, 0,
        x.contiguous(), weight, bias, stream, tap, batch * rows, hidden, 0 if tap is None else tap.stride(1),
    )  # fmt: skip
