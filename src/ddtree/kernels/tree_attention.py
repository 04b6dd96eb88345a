"""Attention of a round's rows over the paged cache and over each other (slow twin).

One shape of attention serves prefill (rows in a chain), verify (rows in a tree), and the drafter's block (rows that see
one another both ways): the rows' own keys stand in the cache at ``committed + row``, and a matrix says which of them a
row may see.
"""

import torch

from ddtree.kernels.paged import slots_of


class TreeAttention:
    """What every layer of one forward pass has in common: which slots are read, and who sees what.

    Args:
        block_table: int64 ``[batch, pages]``.
        committed: int64 ``[batch]``, tokens whose keys are in the cache already.
        depths: int64 ``[batch, rows]``, a row's position less ``committed``.
        ancestors: bool ``[batch, rows, rows]``, which rows a row may see.
        page_tokens: tokens a page holds.
        context_bound: no sequence has more than this many committed tokens (known to the host).
        context_window: see only so many of the last committed tokens (the draft window); None for all.
        dtype: of queries and keys.
    """

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
        batch, rows = depths.shape
        first = 0
        if context_window is not None and depths.device.type == "cpu":
            first = max(int(committed.min()) - context_window, 0)  # nobody sees what lies before
        self.dtype = dtype
        position = torch.arange(first, context_bound + rows, device=depths.device).expand(batch, -1)
        self._slots = slots_of(block_table, position, page_tokens)
        self._run = self._single_run(self._slots)

        row = position - committed[:, None]  # index among the rows; negative for committed tokens
        in_context = row < 0
        if context_window is not None:
            in_context = in_context & (row >= -context_window)
        is_row = (row >= 0) & (row < rows)
        row_index = row.clamp(0, rows - 1)
        seen_row = ancestors.gather(2, row_index[:, None].expand(batch, rows, -1)) & is_row[:, None]
        self._visible = in_context[:, None] | seen_row  # [batch, rows, keys]
        key_depth = torch.where(is_row, depths.gather(1, row_index), row)
        self._distance = depths[:, :, None] - key_depth[:, None]
        self._masks: dict[int | None, torch.Tensor] = {}

    @staticmethod
    def _single_run(slots: torch.Tensor) -> slice | None:
        """On the CPU, one sequence in neighbouring pages is read in place instead of being gathered."""
        if slots.device.type != "cpu" or slots.shape[0] != 1:
            return None
        start, end = int(slots[0, 0]), int(slots[0, -1]) + 1
        return slice(start, end) if bool((slots[0].diff() == 1).all()) else None

    def _mask(self, sliding_window: int | None, groups: int) -> torch.Tensor:
        """Additive mask ``[batch, 1, groups * rows, keys]``."""
        if sliding_window not in self._masks:
            visible = self._visible
            if sliding_window is not None:
                visible = visible & (self._distance < sliding_window)
            mask = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device).masked_fill_(
                ~visible, -torch.inf
            )
            self._masks[sliding_window] = mask.repeat(1, groups, 1)[:, None]
        return self._masks[sliding_window]

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sliding_window: int | None
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: ``[batch, rows, heads, head_dim]``.
            keys, values: one layer's cache, ``[slots, kv_heads, head_dim]``, the rows' own already written.
            sliding_window: positions a query sees, itself included; None for all.

        Returns:
            ``[batch, rows, heads * head_dim]``.
        """
        batch, rows, heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        groups = heads // kv_heads
        # Heads that share keys stand below one another as more rows, so keys are never repeated.
        packed = (
            query.view(batch, rows, kv_heads, groups, head_dim)
            .permute(0, 2, 3, 1, 4)
            .reshape(batch, kv_heads, -1, head_dim)
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            packed, self._read(keys), self._read(values), attn_mask=self._mask(sliding_window, groups)
        )
        return out.view(batch, kv_heads, groups, rows, head_dim).permute(0, 3, 1, 2, 4).reshape(batch, rows, -1)

    def _read(self, cache: torch.Tensor) -> torch.Tensor:
        """``[batch, kv_heads, keys, head_dim]``."""
        seen = cache[self._run][None] if self._run is not None else cache[self._slots]
        return seen.transpose(1, 2)
