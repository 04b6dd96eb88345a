"""Slots and angles of a pass in one launch."""

import torch

from ddtree.kernels.cuda_module import cuda_module
from ddtree.kernels.placement import Placement


def place_rows(
    base: torch.Tensor,
    depths: torch.Tensor,
    valid: torch.Tensor | None,
    block_table: torch.Tensor,
    page_tokens: int,
    frequencies: torch.Tensor,
    scale: float,
) -> Placement:
    """See `ddtree.kernels.placement.place_rows`."""
    batch, rows = depths.shape
    half = frequencies.shape[-1]
    slots = torch.empty(batch, rows, dtype=torch.int64, device=base.device)
    cos, sin = torch.empty(2, batch, rows, half, device=base.device)
    table = block_table.contiguous()
    cuda_module("round_books.cu", base.device).launch(
        "place_rows", (rows, batch, 1), -(-half // 32) * 32, 0,
        base.contiguous(), depths.contiguous(), valid, table, frequencies.contiguous(), slots, cos, sin,
        rows, table.stride(0), page_tokens, half, int(frequencies.dim() == 3), scale,
    )  # fmt: skip
    return Placement(slots, cos, sin)
