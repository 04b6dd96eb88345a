"""Attention of exact mode: every row sees the keys that plain decoding would see, in the same places (slow twin).

A row at position ``p`` attends to keys ``0 .. p``. Those below ``committed`` come from the block table; the key at
``committed + d`` is that of the row's ancestor at depth ``d``, wherever in the cache it stands.
"""

import torch

from ddtree.kernels.paged import slots_of


def ancestors_by_depth(depths: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """Where a row's ancestors stand among the rows.

    Args:
        depths: int64 ``[batch, rows]``, below ``rows``.
        ancestors: bool ``[batch, rows, rows]``, one row of each depth up to a row's own.

    Returns:
        int64 ``[batch, rows, rows]``: ``[b, i, d]`` is the row of row ``i``'s ancestor at depth ``d``; 0 beyond its own
        depth.
    """
    batch, rows = depths.shape
    row = torch.arange(rows, device=depths.device)
    # What is no ancestor goes to a column of its own. A dead row stands at depth 0 beside the root: any of the two.
    column = torch.where(ancestors, depths[:, None], rows)
    found = depths.new_zeros(batch, rows, rows + 1)
    return found.scatter_(2, column, row.expand_as(column))[..., :rows]


class TreeAttention:
    """See `ddtree.kernels.tree_attention.TreeAttention`; ``context_window``, a drafter's, must be None."""

    def __init__(
        self,
        block_table: torch.Tensor,
        committed: torch.Tensor,
        depths: torch.Tensor,
        ancestors: torch.Tensor,
        page_tokens: int,
        context_bound: int,
        context_window: int | None,
        dtype: torch.dtype,
    ) -> None:
        if context_window is not None:
            raise ValueError("exact attention is the target's, which has no draft window")
        above = ancestors_by_depth(depths, ancestors)
        self._slots: list[list[torch.Tensor]] = []
        for sequence, (begin, own) in enumerate(zip(committed.tolist(), depths.tolist(), strict=True)):
            context = torch.arange(begin, device=depths.device)
            table = block_table[sequence : sequence + 1]
            self._slots.append([
                slots_of(table, torch.cat((context, begin + above[sequence, row, : depth + 1]))[None], page_tokens)[0]
                for row, depth in enumerate(own)
            ])  # fmt: skip

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sliding_window: int | None
    ) -> torch.Tensor:
        """See the inexact twin."""
        batch, rows, heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        out = torch.empty_like(query)
        for sequence in range(batch):
            for row in range(rows):
                slots = self._slots[sequence][row]
                if sliding_window is not None:
                    slots = slots[-sliding_window:]
                own = query[sequence, row].view(1, kv_heads, heads // kv_heads, head_dim).clone()
                seen_keys, seen_values = (cache[slots].transpose(0, 1)[None] for cache in (keys, values))
                attended = torch.nn.functional.scaled_dot_product_attention(own, seen_keys, seen_values)
                out[sequence, row] = attended.reshape(heads, head_dim)  # a GPU's result may lie otherwise
        return out.view(batch, rows, heads * head_dim)
