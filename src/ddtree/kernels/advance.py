"""Bookkeeping of a commit: which cache rows move where, and the sequences' new lengths and roots (slow twin)."""

from dataclasses import dataclass

import torch

from ddtree.kernels.paged import TRASH_PAGE, slots_of
from ddtree.kernels.tree_walk import AcceptedPaths


@dataclass(frozen=True)
class Moves:
    """What a commit leaves to do.

    Attributes:
        source, target: int64 ``[batch * n]`` slots; targets in the trash page drop a row.
        packed: int64 ``[batch, 1 + n]``, accepted nodes and then the round's tokens, for the host.
    """

    source: torch.Tensor
    target: torch.Tensor
    packed: torch.Tensor


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
    """Commit root and accepted nodes of every sequence.

    Args:
        path: what the target accepted.
        row_slots: int64 ``[batch, rows]``, where the verified rows stand.
        block_table: int64 ``[batch, pages]``.
        seats: int64 ``[batch]``, the sequences' places in the next three, which are updated.
        committed, roots: int64 ``[all]``.
        pending_taps: int64 ``[all]``, set to the number of committed rows; None where nobody drafts.
    """
    step = torch.arange(path.rows.shape[1], device=path.rows.device)
    place = slots_of(block_table, committed[seats][:, None] + step, page_tokens)
    target = torch.where(step <= path.accepted[:, None], place, TRASH_PAGE)
    committed[seats] += path.accepted + 1
    roots[seats] = path.roots
    if pending_taps is not None:
        pending_taps[seats] = path.accepted + 1
    packed = torch.cat((path.accepted[:, None], path.tokens), dim=1)
    return Moves(row_slots.gather(1, path.rows).flatten(), target.flatten(), packed)


def keep_taps(kept: torch.Tensor, seats: torch.Tensor, taps: torch.Tensor, rows: torch.Tensor) -> None:
    """Keep the taps of the accepted rows until they are injected.

    Args:
        kept: ``[all, at least n, size]``, the first n rows written at ``seats``.
        seats: int64 ``[batch]``.
        taps: ``[batch, rows, size]`` of all verified rows.
        rows: int64 ``[batch, n]``.
    """
    kept[seats, : rows.shape[1]] = taps.gather(1, rows[..., None].expand(-1, -1, taps.shape[-1]))


def hand_over(packed: torch.Tensor, host: torch.Tensor) -> None:
    """Begin to copy ``packed`` (int64, contiguous) to ``host``, pinned memory of the same shape."""
    host.copy_(packed, non_blocking=True)
