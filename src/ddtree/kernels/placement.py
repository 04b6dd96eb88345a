"""Where the rows of a pass stand: their cache slots and their rotation angles (slow twin)."""

from dataclasses import dataclass

import torch

from ddtree.kernels.paged import TRASH_PAGE, slots_of


@dataclass(frozen=True)
class Placement:
    """Places of rows.

    Attributes:
        slots: int64 ``[batch, rows]``, where keys and values go.
        cos, sin: float32 ``[batch, rows, head_dim / 2]``.
    """

    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def place_rows(
    base: torch.Tensor,
    depths: torch.Tensor,
    valid: torch.Tensor | None,
    block_table: torch.Tensor,
    page_tokens: int,
    frequencies: torch.Tensor,
    scale: float,
) -> Placement:
    """Put row ``i`` in the slot of token ``base + i``, rotated for position ``base + depth``.

    Args:
        base: int64 ``[batch]``.
        depths: int64 ``[batch, rows]``.
        valid: int64 ``[batch]``, rows from this one on go to the trash page; None keeps all.
        block_table: int64 ``[batch, pages]``.
        page_tokens: tokens a page holds.
        frequencies: float32 ``[head_dim / 2]``, or ``[batch, rows, head_dim / 2]`` where they depend on the position.
        scale: factor on cos and sin.
    """
    row = torch.arange(depths.shape[1], device=depths.device)
    slots = slots_of(block_table, base[:, None] + row, page_tokens)
    if valid is not None:
        slots = torch.where(row < valid[:, None], slots, TRASH_PAGE)
    angles = (base[:, None] + depths)[..., None].float() * frequencies
    return Placement(slots, angles.cos() * scale, angles.sin() * scale)
