"""Who sees whom: packed conversations in the target, many drafted blocks at once in the drafter.

On a GPU attention is flex attention, which skips what is not visible by tiles of 128; on a CPU the same rule becomes a
matrix of booleans for plain attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from ddtree.errors import UserError

TILE = 128
Rule = Callable[[Any, Any, Any, Any], Any]
"""``(row, head, query, key)`` to whether the query sees the key."""
Mask = BlockMask | torch.Tensor


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Mask) -> torch.Tensor:
    """Attention under a mask.

    Args:
        query: ``[rows, heads, queries, head_dim]``.
        keys, values: ``[rows, kv_heads, keys, head_dim]``.
        mask: from `TargetMask` or `DraftMask`.

    Returns:
        like ``query``.
    """
    if isinstance(mask, BlockMask):
        return flex_attention(query, keys, values, block_mask=mask, enable_gqa=True)
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


class TargetMask:
    """Conversations beside each other in a row do not see each other.

    Args:
        windows: sliding windows of the target's layers.
        tiled: masks for flex attention, the default on a GPU, instead of matrices.
    """

    def __init__(
        self,
        rows: int,
        row_tokens: int,
        windows: tuple[int | None, ...],
        device: torch.device,
        tiled: bool | None = None,
    ) -> None:
        self._tiled = device.type == "cuda" if tiled is None else tiled
        _require_tiles(self._tiled, row_tokens, f"rows of {row_tokens} tokens")
        self._starts = torch.zeros(rows, row_tokens, dtype=torch.int32, device=device)
        self._rules = {window: self._rule(window) for window in set(windows)}

    def masks(self, starts: torch.Tensor) -> dict[int | None, Mask]:
        """The mask of each sliding window.

        Args:
            starts: ``[rows, row_tokens]``, as in `PackedRows`.
        """
        self._starts.copy_(starts)
        row_tokens = starts.shape[1]
        if not self._tiled:
            return {window: dense(rule, len(starts), row_tokens, row_tokens) for window, rule in self._rules.items()}
        first = starts[:, ::TILE] // TILE
        last = torch.arange(row_tokens // TILE, device=starts.device).expand_as(first)
        return {window: _tiles([(first, last)], row_tokens, row_tokens, rule) for window, rule in self._rules.items()}

    def _rule(self, window: int | None) -> Rule:
        starts = self._starts

        def sees(row: Any, head: Any, query: Any, key: Any) -> Any:
            seen = (key <= query) & (key >= starts[row, query])
            return seen if window is None else seen & (query - key < window)

        return sees


class DraftMask:
    """A block sees its own conversation strictly before its root, and itself.

    Keys are the row's tokens (their taps) and, behind them, the blocks one after another; queries are the blocks.

    Args:
        block: tokens of a block.
        windows: sliding windows of the drafter's layers.
        is_causal: rows of the block see only rows before them, in every layer.
        sliding_is_causal: the same for layers with a sliding window alone.
        draft_window: context tokens that a block sees at most, counted back from its root.
        tiled: masks for flex attention, the default on a GPU, instead of matrices.
    """

    def __init__(
        self,
        rows: int,
        row_tokens: int,
        anchors: int,
        block: int,
        windows: tuple[int | None, ...],
        *,
        is_causal: bool,
        sliding_is_causal: bool,
        draft_window: int | None,
        device: torch.device,
        tiled: bool | None = None,
    ) -> None:
        self._tiled = device.type == "cuda" if tiled is None else tiled
        _require_tiles(self._tiled, row_tokens, f"rows of {row_tokens} tokens")
        _require_tiles(self._tiled, anchors * block, f"{anchors} anchors a row with blocks of {block}")
        self._row_tokens, self._block, self._draft_window = row_tokens, block, draft_window
        self._roots = torch.zeros(rows, anchors, dtype=torch.int32, device=device)
        self._first = torch.zeros_like(self._roots)
        self._rules = {
            window: self._rule(window, is_causal or (sliding_is_causal and window is not None))
            for window in set(windows)
        }

    def masks(self, roots: torch.Tensor, starts: torch.Tensor) -> dict[int | None, Mask]:
        """The mask of each sliding window.

        Args:
            roots, starts: ``[rows, anchors]``, as in `Anchors`; roots ascend.
        """
        first = starts if self._draft_window is None else torch.maximum(starts, roots - self._draft_window)
        self._roots.copy_(roots)
        self._first.copy_(first)
        queries = roots.shape[1] * self._block
        keys = self._row_tokens + queries
        if not self._tiled:
            return {window: dense(rule, len(roots), queries, keys) for window, rule in self._rules.items()}
        ranges = draft_tiles(roots, first, self._row_tokens, self._block)
        return {window: _tiles(ranges, queries, keys, rule) for window, rule in self._rules.items()}

    def _rule(self, window: int | None, is_causal: bool) -> Rule:
        roots, first, row_tokens, block = self._roots, self._first, self._row_tokens, self._block

        def sees(row: Any, head: Any, query: Any, key: Any) -> Any:
            n, slot = query // block, query % block
            context = (key < roots[row, n]) & (key >= first[row, n])
            own_slot = key - row_tokens - n * block
            own = (own_slot >= 0) & (own_slot < block)
            if is_causal:
                own = own & (own_slot <= slot)
            if window is not None:
                context = context & (roots[row, n] + slot - key < window)
                own = own & (slot - own_slot < window)
            return context | own

        return sees


def draft_tiles(
    roots: torch.Tensor, first: torch.Tensor, row_tokens: int, block: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Which tiles of keys each tile of queries may see: the context's, and those of its own blocks.

    Returns:
        two ranges of tiles, both ends included, each ``[rows, query_tiles]``; an empty one ends before it begins.
    """
    count = roots.shape[1]
    begin = torch.arange(count * block // TILE, device=roots.device) * TILE
    low, high = begin // block, ((begin + TILE - 1) // block).clamp(max=count - 1)
    # A tile's blocks are neighbours, and roots ascend: its last root ends its context. The earliest beginning is that
    # of its first block, because conversations ascend with them.
    from_tile, to_token = first[:, low] // TILE, roots[:, high]
    to_tile = torch.where(to_token > first[:, low], (to_token - 1).clamp(min=0) // TILE, from_tile - 1)
    own_from = (row_tokens + low * block) // TILE
    own_to = (row_tokens + (high + 1) * block - 1) // TILE
    return [(from_tile, to_tile), (own_from.expand_as(from_tile), own_to.expand_as(from_tile))]


def dense(rule: Rule, rows: int, queries: int, keys: int) -> torch.Tensor:
    """The rule as a boolean matrix ``[rows, 1, queries, keys]``, on the CPU."""
    row = torch.arange(rows)[:, None, None]
    return rule(row, 0, torch.arange(queries)[:, None], torch.arange(keys))[:, None]


def _tiles(ranges: list[tuple[torch.Tensor, torch.Tensor]], queries: int, keys: int, rule: Rule) -> BlockMask:
    """A block mask of contiguous ranges of key tiles for each query tile."""
    counts, lists = tile_lists(ranges, keys // TILE)
    return BlockMask.from_kv_blocks(
        counts[:, None], lists[:, None], None, None, BLOCK_SIZE=(TILE, TILE), mask_mod=rule, seq_lengths=(queries, keys)
    )


def tile_lists(ranges: list[tuple[torch.Tensor, torch.Tensor]], key_tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranges, which do not overlap and ascend, as flex attention wants them.

    Returns:
        int32 ``[rows, query_tiles]``, number of tiles, and ``[rows, query_tiles, key_tiles]``, the tiles, then zeros.
    """
    place = torch.arange(key_tiles, device=ranges[0][0].device)
    before = torch.zeros_like(ranges[0][0])[..., None]
    tiles = torch.zeros_like(before)
    for first, last in ranges:
        length = (last - first + 1).clamp(min=0)[..., None]
        inside = (place >= before) & (place < before + length)
        tiles = torch.where(inside, first[..., None] + place - before, tiles)
        before = before + length
    return before[..., 0].int(), tiles.int()


def _require_tiles(tiled: bool, size: int, what: str) -> None:
    if tiled and size % TILE:
        raise UserError(f"{what} are no multiple of {TILE}", f"on a GPU choose sizes that make multiples of {TILE}")
