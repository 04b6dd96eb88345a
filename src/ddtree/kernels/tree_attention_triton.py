"""Attention of a round's rows over the paged cache and over each other, split over the keys.

Query heads that share keys are packed below one another into one tile. Each program attends one tile to one stretch of
the keys; the program that finishes a tile last puts the stretches together. How long the stretches are follows from the
committed length that the device knows, so a grid made for a long context costs little on a short one.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from typing import ClassVar

import torch
import triton
import triton.language as tl


@triton.jit
def _scores(
    q,
    keys,
    block_row,
    position,
    end,
    kv_stride,
    head_offset,
    d,
    scale_log2,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scaled scores of a tile of keys, and where the keys' values are."""
    inside = position < end
    page = tl.load(block_row + position // PAGE, mask=inside, other=0)
    offset = (page * PAGE + position % PAGE) * kv_stride + head_offset
    k = tl.load(keys + offset[None, :] + d[:, None], mask=inside[None, :], other=0.0)
    return tl.dot(q, k, input_precision=PRECISION) * scale_log2, offset, inside


@triton.jit
def _accumulate(scores, seen, values, offset, inside, d, largest, weight, acc, PRECISION: tl.constexpr):
    """One step of the online softmax (base 2)."""
    scores = tl.where(seen, scores, -float("inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    # A row that has seen no key yet keeps -inf, and -inf less -inf would be NaN.
    base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
    p = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    v = tl.load(values + offset[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_largest, weight * shrink + tl.sum(p, axis=1), acc


@triton.jit
def _attention_kernel(
    query, keys, values, out, partial, partial_lse, arrived, block_table, committed, depths, ancestors,
    rows, kv_heads, table_stride, kv_stride, scale_log2, context_window, sliding_window,
    GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, HAS_CONTEXT_WINDOW: tl.constexpr, HAS_SLIDING_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    n_context = tl.load(committed + sequence).to(tl.int32)
    first = 0
    if HAS_CONTEXT_WINDOW:
        first = tl.maximum(first, n_context - context_window)
    if HAS_SLIDING_WINDOW:
        first = tl.maximum(first, n_context - sliding_window + 1)  # depths are at least 0
    first = first // BLOCK_N * BLOCK_N
    end = n_context + rows
    n_tiles = tl.cdiv(end - first, BLOCK_N)
    tiles_a_split = tl.cdiv(n_tiles, SPLITS)
    used_splits = tl.cdiv(n_tiles, tiles_a_split)
    if split >= used_splits:
        return
    start = first + split * tiles_a_split * BLOCK_N
    stop = tl.minimum(start + tiles_a_split * BLOCK_N, end)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m // GROUPS
    is_row = row < rows
    d = tl.arange(0, HEAD_DIM)
    row_of_all = sequence.to(tl.int64) * rows + row
    q_offset = (row_of_all * kv_heads + head) * GROUPS * HEAD_DIM + (m % GROUPS) * HEAD_DIM
    q = tl.load(query + q_offset[:, None] + d[None, :], mask=is_row[:, None], other=0.0)
    depth = tl.load(depths + row_of_all, mask=is_row, other=0).to(tl.int32)
    block_row = block_table + sequence * table_stride
    head_offset = head * HEAD_DIM

    largest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    # Tiles of committed tokens only: no ancestors to ask for.
    context_stop = tl.maximum(tl.minimum(stop, n_context // BLOCK_N * BLOCK_N), start)
    for at in range(start, context_stop, BLOCK_N):
        position = at + tl.arange(0, BLOCK_N)
        scores, offset, inside = _scores(
            q, keys, block_row, position, end, kv_stride, head_offset, d, scale_log2, PAGE, PRECISION
        )
        relative = position - n_context
        seen = inside[None, :] & is_row[:, None]
        if HAS_CONTEXT_WINDOW:
            seen = seen & (relative >= -context_window)[None, :]
        if HAS_SLIDING_WINDOW:
            seen = seen & (depth[:, None] - relative[None, :] < sliding_window)
        largest, weight, acc = _accumulate(scores, seen, values, offset, inside, d, largest, weight, acc, PRECISION)
    for at in range(context_stop, stop, BLOCK_N):
        position = at + tl.arange(0, BLOCK_N)
        scores, offset, inside = _scores(
            q, keys, block_row, position, end, kv_stride, head_offset, d, scale_log2, PAGE, PRECISION
        )
        relative = position - n_context
        is_key_row = (relative >= 0) & (relative < rows)
        below = tl.load(
            ancestors + row_of_all[:, None] * rows + relative[None, :],
            mask=is_row[:, None] & is_key_row[None, :],
            other=0,
        )
        in_context = relative < 0
        if HAS_CONTEXT_WINDOW:
            in_context = in_context & (relative >= -context_window)
        seen = (in_context[None, :] & is_row[:, None]) | (below != 0)
        if HAS_SLIDING_WINDOW:
            row_depth = tl.load(depths + sequence * rows + relative, mask=is_key_row, other=0).to(tl.int32)
            key_depth = tl.where(is_key_row, row_depth, relative)
            seen = seen & (depth[:, None] - key_depth[None, :] < sliding_window)
        largest, weight, acc = _accumulate(scores, seen, values, offset, inside, d, largest, weight, acc, PRECISION)

    is_last = True
    if SPLITS > 1:  # noqa: SIM102 (known at compile time, unlike the next)
        if used_splits > 1:
            # Normalised partial results and their base-2 log-sum-exp, put together by whoever comes last.
            lse = tl.where(weight > 0, largest + tl.log2(weight), -float("inf"))
            place = ((sequence * kv_heads + head) * tl.num_programs(0) + tile).to(tl.int64)
            slot = (place * SPLITS + split) * BLOCK_M + tl.arange(0, BLOCK_M)
            acc = acc / tl.where(weight > 0, weight, 1.0)[:, None]
            tl.store(partial + slot[:, None] * HEAD_DIM + d[None, :], acc, mask=is_row[:, None])
            tl.store(partial_lse + slot, lse)
            tl.debug_barrier()  # every thread's part is written before one thread says so
            is_last = tl.atomic_add(arrived + place, 1, sem="acq_rel") == used_splits - 1
            if is_last:
                tl.store(arrived + place, 0)  # ready for the next layer
                largest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
                weight = tl.zeros((BLOCK_M,), tl.float32)
                acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
                for other in range(used_splits):
                    slot = (place * SPLITS + other) * BLOCK_M + tl.arange(0, BLOCK_M)
                    lse = tl.load(partial_lse + slot, cache_modifier=".cg")
                    part = tl.load(
                        partial + slot[:, None] * HEAD_DIM + d[None, :],
                        mask=is_row[:, None], other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
                    new_largest = tl.maximum(largest, lse)
                    base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
                    shrink, share = tl.exp2(largest - base), tl.exp2(lse - base)
                    acc = acc * shrink[:, None] + part * share[:, None]
                    weight = weight * shrink + share
                    largest = new_largest
    if is_last:
        acc = acc / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(out + q_offset[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=is_row[:, None])


class TreeAttention:
    """See `ddtree.kernels.tree_attention.TreeAttention`. The head size must be a power of 2, at least 16.

    Attributes:
        programs: split the keys until there are about so many programs (an H100 or H200 has 132 multiprocessors).
        tile_rows, tile_keys: at most so many packed query rows, and so many keys, a tile.
    """

    programs: ClassVar[int] = 264
    tile_rows: ClassVar[int] = 64
    tile_keys: ClassVar[int] = 64
    warps: ClassVar[int] = 4
    stages: ClassVar[int] = 2

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
        self.dtype = dtype
        self._block_table = block_table.contiguous()
        self._committed = committed.contiguous()
        self._depths = depths.contiguous()
        self._ancestors = ancestors.contiguous().view(torch.uint8)
        self._page_tokens = page_tokens
        self._keys_bound = context_bound + depths.shape[1]
        self._context_window = context_window
        if context_window is not None:
            self._keys_bound = min(self._keys_bound, context_window + depths.shape[1])
        self._workspace: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sliding_window: int | None
    ) -> torch.Tensor:
        """See the twin."""
        batch, rows, heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        groups = heads // kv_heads
        query = query.contiguous()
        wide = query.dtype == torch.float32
        block_m = min(max(triton.next_power_of_2(rows * groups), 16), 32 if wide else self.tile_rows)
        block_n = 32 if wide else self.tile_keys
        tiles_m = triton.cdiv(rows * groups, block_m)
        key_tiles = triton.cdiv(self._keys_bound, block_n) + 1
        splits = max(1, min(self.programs // (tiles_m * kv_heads * batch), key_tiles // 2, 32))
        out = torch.empty_like(query)
        partial, lse, arrived = self._scratch(batch * kv_heads * tiles_m, splits, block_m, head_dim)
        _attention_kernel[(tiles_m, kv_heads, batch * splits)](
            query, keys, values, out, partial, lse, arrived,
            self._block_table, self._committed, self._depths, self._ancestors,
            rows, kv_heads, self._block_table.stride(0), keys.stride(0), head_dim**-0.5 * 1.4426950408889634,
            self._context_window or 0, sliding_window or 0,
            GROUPS=groups, HEAD_DIM=head_dim, BLOCK_M=block_m, BLOCK_N=block_n, PAGE=self._page_tokens, SPLITS=splits,
            HAS_CONTEXT_WINDOW=self._context_window is not None, HAS_SLIDING_WINDOW=sliding_window is not None,
            PRECISION="ieee" if wide else "tf32", num_warps=self.warps, num_stages=self.stages,
        )  # fmt: skip
        return out.view(batch, rows, heads * head_dim)

    def _scratch(
        self, places: int, splits: int, block_m: int, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Partial results, shared by all layers of the pass; the counters return to 0 after each."""
        n = places * splits * block_m
        sizes = (n * head_dim, n, places)
        if self._workspace is None or any(t.numel() < size for t, size in zip(self._workspace, sizes, strict=True)):
            device = self._depths.device
            self._workspace = (
                torch.empty(n * head_dim, device=device),
                torch.empty(n, device=device),
                torch.zeros(places, dtype=torch.int32, device=device),
            )
        return self._workspace
