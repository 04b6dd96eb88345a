"""Products of large weights with few rows in CUDA C++ for Hopper: see ``cuda/wide_products.cu``."""

import torch

from ddtree.kernels.cuda_module import cuda_module
from ddtree.kernels.tensor_map import tensor_map
from ddtree.kernels.wide_tiling import WideTile, rows_in_eights

SOURCE = "wide_products.cu"
_FETCH_BYTES = 128  # 0.5 to 1.8 % of whole layers faster than 256


def defines(tile: WideTile, rows: int, gated: bool) -> dict[str, int]:
    """What is fixed when the kernel is compiled."""
    eights = rows_in_eights(rows) // 8
    fixed = {"ROWS": 8 * eights, "EIGHTS": eights, "TILES": tile.columns // 64, "BOXES": tile.depth // 64}
    fixed |= {"STAGES": tile.stages, "GATED": int(gated and not tile.leaves_sums)}
    return fixed | {"CLUSTER": tile.splits if tile.joined else 1}


def multiply(
    tile: WideTile,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stream: torch.Tensor | None = None,
    tap: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """``x`` times the transposed ``weight``: the finished result, or the sums of each stretch where it leaves them.

    Args:
        tile: one by ``wgmma`` that fits; see `WideTile.fits`.
        x: contiguous bf16 ``[rows, size]``.
        weight, bias: contiguous bf16 ``[columns, size]`` and its first axis.
        stream, tap: ``[rows, columns]``; the product is added to ``stream`` and kept in ``tap`` as well.
        gated: silu of the first half of the columns, times the second half.

    Returns:
        ``[rows, columns]`` (half as many where gated; ``stream`` where there is one); of a tile that leaves sums
        float32 ``[splits, rows, columns]``, without bias, gate and stream.
    """
    (rows, size), columns = x.shape, weight.shape[0]
    split, out = tile.leaves_sums, tile.empty_result(x, columns, stream, gated)
    steps, programs = size // tile.depth, columns // tile.columns
    own = tile.columns // 2 if gated and not split else tile.columns
    grid = (tile.splits, programs, 1) if tile.joined else (programs, tile.splits, 1)
    cuda_module(SOURCE, x.device, **defines(tile, rows, gated)).launch(
        "wide_product", grid, 2 * tile.columns + 32, tile.shared_bytes(rows),
        tensor_map(weight, own, _FETCH_BYTES), tensor_map(x, rows_in_eights(rows), _FETCH_BYTES), bias,
        None if split else out, out if split else None, tap, rows, columns, steps, -(-steps // tile.splits),
        int(stream is not None), 0 if tap is None else tap.stride(0), int(tile.calls_late), early=tile.early,
    )  # fmt: skip
    return out
