"""The books of a commit in one launch, and the kept taps in another."""

import torch

from ddtree.kernels import advance as twin
from ddtree.kernels.advance import Moves
from ddtree.kernels.cuda_module import cuda_module
from ddtree.kernels.tree_walk import AcceptedPaths


def advance(
    path: AcceptedPaths,
    row_slots: torch.Tensor,
    block_table: torch.Tensor,
    page_tokens: int,
    seats: torch.Tensor,
    committed: torch.Tensor,
    roots: torch.Tensor,
    pending_taps: torch.Tensor | None,
) -> Moves:
    """See `ddtree.kernels.advance.advance`; no two sequences but spare ones have one seat."""
    batch, steps = path.rows.shape
    source, target = torch.empty(2, batch * steps, dtype=torch.int64, device=seats.device)
    packed = torch.empty(batch, 1 + steps, dtype=torch.int64, device=seats.device)
    table = block_table.contiguous()
    cuda_module("round_books.cu", seats.device).launch(
        "advance", (batch, 1, 1), -(-steps // 32) * 32, 0,
        path.rows.contiguous(), path.accepted, path.tokens.contiguous(), path.roots, row_slots.contiguous(), table,
        seats, committed, roots, pending_taps, source, target, packed,
        steps, row_slots.shape[1], table.stride(0), page_tokens,
    )  # fmt: skip
    return Moves(source, target, packed)


def keep_taps(kept: torch.Tensor, seats: torch.Tensor, taps: torch.Tensor, rows: torch.Tensor) -> None:
    """See `ddtree.kernels.advance.keep_taps`."""
    row_bytes = taps.shape[-1] * taps.element_size()
    if row_bytes % 16:
        twin.keep_taps(kept, seats, taps, rows)
        return
    batch, steps = rows.shape
    pieces = row_bytes // 16
    cuda_module("round_books.cu", taps.device).launch(
        "keep_taps", (steps, batch, 1), min(-(-pieces // 32) * 32, 256), 0,
        kept, seats, taps.contiguous(), rows.contiguous(), steps, kept.shape[1], taps.shape[1], pieces,
    )  # fmt: skip


def hand_over(packed: torch.Tensor, host: torch.Tensor) -> None:
    """See `ddtree.kernels.advance.hand_over`; a kernel writes to the host's memory, without the copy engine, which has
    to be waited for twice."""
    n = packed.numel()
    cuda_module("round_books.cu", packed.device).launch(
        "hand_over", (-(-n // 256), 1, 1), 256, 0, packed.contiguous(), host, n
    )
