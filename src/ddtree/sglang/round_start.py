"""What a round begins with: the drafter's block and the K/V slots behind the committed tokens (slow twin)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RoundStart:
    """Inputs of the draft pass and the places of the verify pass.

    Attributes:
        block_ids: int64 ``[batch, block_size]``, the root and then masks.
        block_positions: int64 ``[batch, block_size]``.
        slots: int64 ``[batch, slots]``, K/V slots of the positions ``committed ..``; the last one of the table repeats
            where the table ends.
    """

    block_ids: torch.Tensor
    block_positions: torch.Tensor
    slots: torch.Tensor


def start_round(
    roots: torch.Tensor,
    committed: torch.Tensor,
    request_rows: torch.Tensor,
    request_to_token: torch.Tensor,
    block_size: int,
    slots: int,
    mask_token_id: int,
) -> RoundStart:
    """Lay out a round of every sequence.

    Args:
        roots: int64 ``[batch]``.
        committed: int64 ``[batch]``.
        request_rows: int64 ``[batch]``, each sequence's row of ``request_to_token``.
        request_to_token: int32 ``[requests, positions]``, SGLang's table of K/V slots.
        block_size, slots: as in `ddtree.sglang.settings.TreeSettings`.
        mask_token_id: the drafter's.
    """
    block_ids = roots.new_full((len(roots), block_size), mask_token_id)
    block_ids[:, 0] = roots
    block_positions = committed[:, None] + torch.arange(block_size, device=roots.device)
    columns = committed[:, None] + torch.arange(slots, device=roots.device)
    columns = columns.clamp_max(request_to_token.shape[1] - 1)
    return RoundStart(block_ids, block_positions, request_to_token[request_rows[:, None], columns].long())
