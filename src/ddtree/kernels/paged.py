"""Addresses in a paged cache. A slot is one token's place; page 0 belongs to nobody and takes what must not be kept."""

import torch

TRASH_PAGE = 0


def slots_of(block_table: torch.Tensor, positions: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """Slots of token positions.

    Args:
        block_table: int64 ``[batch, pages]``, page numbers; ``TRASH_PAGE`` where none is reserved.
        positions: int64 ``[batch, rows]``.
        page_tokens: tokens a page holds.

    Returns:
        int64 ``[batch, rows]``.
    """
    pages = block_table.gather(1, positions // page_tokens)
    return pages * page_tokens + positions % page_tokens


def move_rows(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy tokens of all layers to other slots, reading everything before anything is written.

    Args:
        cache: ``[layers, 2, slots, kv_heads, head_dim]``.
        source, target: int64 ``[n]`` slots; a slot of the trash page as target drops the token.
    """
    cache[:, :, target] = cache[:, :, source]
