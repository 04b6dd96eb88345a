"""Attention of exact mode: keys tiled by the position that plain decoding would give them.

A row's keys are cut into stretches of `SPLIT` positions and those into tiles, both counted from position 0. Each
stretch is summed from nothing, and a row's stretches are put together in ascending order: by a second kernel where they
were run side by side, else by the same program, with the same operations. What a row does not see of a tile, because
the tile belongs to other rows as well, changes nothing in its sums, not even their last bit.

Rows of a chain (prefill, plain decoding, chains) find the key of every position where the block table says. The rows of
a tree share their keys up to the tile in which the tree begins; from there on the tile is gathered anew for each row,
through a product of the same shape, from which that row's results are taken.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

from ddtree.kernels.exact_attention import ancestors_by_depth

SPLIT = 256
MAX_PARTIAL_BYTES = 2**28
"""Stretches run side by side only while their results take no more memory than this."""


@triton.jit
def _tile_of(cache, block_row, position, seen, kv_stride, head_offset, PAGE: tl.constexpr):
    """Addresses of a tile's keys or values."""
    page = tl.load(block_row + position // PAGE, mask=seen, other=0)
    return cache + (page * PAGE + position % PAGE) * kv_stride + head_offset


@triton.jit
def _softmax_step(scores, largest, weight):
    """One step of the online softmax (base 2)."""
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    # A row that has seen no key yet keeps -inf, and -inf less -inf would be NaN.
    base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
    p = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    return p, shrink, new_largest, weight * shrink + tl.sum(p, axis=1)


@triton.jit(do_not_specialize=["rows", "n_splits", "table_stride"])
def _attention_kernel(
    query, keys, values, out, partial, partial_scale, block_table, committed, depths, above, chains,
    rows, kv_heads, table_stride, kv_stride, scale_log2, sliding_window, n_splits,
    GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, PAGE: tl.constexpr, PARALLEL: tl.constexpr, HAS_SLIDING_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.program_id(2)
    if PARALLEL:
        sequence = tl.program_id(2) // n_splits
    n_context = tl.load(committed + sequence).to(tl.int32)
    is_chain = tl.load(chains + sequence)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m // GROUPS
    is_row = row < rows
    d = tl.arange(0, BLOCK_D)
    is_d = d < HEAD_DIM
    row_of_all = sequence.to(tl.int64) * rows + row
    head_of_all = (row_of_all * kv_heads + head) * GROUPS + m % GROUPS
    q = tl.load(query + head_of_all[:, None] * HEAD_DIM + d[None, :], mask=is_row[:, None] & is_d[None, :], other=0.0)
    own = n_context + tl.load(depths + row_of_all, mask=is_row, other=0).to(tl.int32)  # position of each row
    block_row = block_table + sequence.to(tl.int64) * table_stride
    head_offset = head * HEAD_DIM

    end = tl.max(tl.where(is_row, own, 0), axis=0) + 1
    begin = 0
    if HAS_SLIDING_WINDOW:
        begin = tl.maximum(tl.min(tl.where(is_row, own, end), axis=0) - sliding_window + 1, 0)
    first_split, last_split = begin // SPLIT_KEYS, tl.cdiv(end, SPLIT_KEYS)
    if PARALLEL:
        split_here = tl.program_id(2) % n_splits
        first_split = tl.maximum(first_split, split_here)
        last_split = tl.minimum(last_split, split_here + 1)
    first_row = tile * BLOCK_M // GROUPS
    last_row = tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUPS + 1, rows)

    total_largest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total_weight = tl.zeros((BLOCK_M,), tl.float32)
    total_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for split in range(first_split, last_split):
        start = tl.maximum(split * SPLIT_KEYS, begin // BLOCK_N * BLOCK_N)
        stop = tl.minimum((split + 1) * SPLIT_KEYS, end)
        shared_stop = stop  # tiles before it are the same for all rows
        if is_chain == 0:
            shared_stop = tl.maximum(tl.minimum(stop, n_context // BLOCK_N * BLOCK_N), start)
        largest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for at in range(start, shared_stop, BLOCK_N):
            position = at + tl.arange(0, BLOCK_N)
            inside = position < end
            k_tile = _tile_of(keys, block_row, position, inside, kv_stride, head_offset, PAGE)
            v_tile = _tile_of(values, block_row, position, inside, kv_stride, head_offset, PAGE)
            k = tl.load(k_tile[None, :] + d[:, None], mask=inside[None, :] & is_d[:, None], other=0.0)
            scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
            seen = position[None, :] <= own[:, None]
            if HAS_SLIDING_WINDOW:
                seen = seen & (own[:, None] - position[None, :] < sliding_window)
            scores = tl.where(seen & is_row[:, None], scores, -float("inf"))
            p, shrink, largest, weight = _softmax_step(scores, largest, weight)
            v = tl.load(v_tile[:, None] + d[None, :], mask=inside[:, None] & is_d[None, :], other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        for at in range(shared_stop, stop, BLOCK_N):
            position = at + tl.arange(0, BLOCK_N)
            scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for one in range(first_row, last_row):
                one_of_all = sequence.to(tl.int64) * rows + one
                last = n_context + tl.load(depths + one_of_all).to(tl.int32)
                inside = position <= last
                depth = position - n_context
                at_depth = tl.load(above + one_of_all * rows + depth, mask=inside & (depth >= 0), other=0)
                stands = tl.where(depth >= 0, n_context + at_depth, position)
                k_tile = _tile_of(keys, block_row, stands, inside, kv_stride, head_offset, PAGE)
                k = tl.load(k_tile[None, :] + d[:, None], mask=inside[None, :] & is_d[:, None], other=0.0)
                scores = tl.where((row == one)[:, None], tl.dot(q, k, input_precision=PRECISION) * scale_log2, scores)
            seen = position[None, :] <= own[:, None]
            if HAS_SLIDING_WINDOW:
                seen = seen & (own[:, None] - position[None, :] < sliding_window)
            scores = tl.where(seen & is_row[:, None], scores, -float("inf"))
            p, shrink, largest, weight = _softmax_step(scores, largest, weight)
            before = acc * shrink[:, None]
            acc = before
            for one in range(first_row, last_row):
                one_of_all = sequence.to(tl.int64) * rows + one
                last = n_context + tl.load(depths + one_of_all).to(tl.int32)
                inside = position <= last
                depth = position - n_context
                at_depth = tl.load(above + one_of_all * rows + depth, mask=inside & (depth >= 0), other=0)
                stands = tl.where(depth >= 0, n_context + at_depth, position)
                v_tile = _tile_of(values, block_row, stands, inside, kv_stride, head_offset, PAGE)
                v = tl.load(v_tile[:, None] + d[None, :], mask=inside[:, None] & is_d[None, :], other=0.0)
                its = tl.dot(p.to(v.dtype), v, before, input_precision=PRECISION)
                acc = tl.where((row == one)[:, None], its, acc)
        if PARALLEL:
            slot = head_of_all * n_splits + split
            place = slot[:, None] * BLOCK_D + d[None, :]
            tl.store(partial + place, acc, mask=is_row[:, None] & is_d[None, :])
            tl.store(partial_scale + 2 * slot, largest, mask=is_row)
            tl.store(partial_scale + 2 * slot + 1, weight, mask=is_row)
        else:
            new_largest = tl.maximum(total_largest, largest)
            base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
            shrink, share = tl.exp2(total_largest - base), tl.exp2(largest - base)
            total_acc = total_acc * shrink[:, None] + acc * share[:, None]
            total_weight = total_weight * shrink + weight * share
            total_largest = new_largest
    if not PARALLEL:
        result = total_acc / tl.where(total_weight > 0, total_weight, 1.0)[:, None]
        place = head_of_all[:, None] * HEAD_DIM + d[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_d[None, :])


@triton.jit(do_not_specialize=["rows", "n_splits"])
def _put_together_kernel(
    partial, partial_scale, committed, depths, out, rows, heads, sliding_window, n_splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT_KEYS: tl.constexpr, HAS_SLIDING_WINDOW: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    own = tl.load(committed + row // rows).to(tl.int32) + tl.load(depths + row).to(tl.int32)
    first = 0
    if HAS_SLIDING_WINDOW:
        first = tl.maximum(own - sliding_window + 1, 0) // SPLIT_KEYS
    head_of_all = row.to(tl.int64) * heads + head
    d = tl.arange(0, BLOCK_D)
    is_d = d < HEAD_DIM
    total_largest = tl.full((1,), -float("inf"), tl.float32)
    total_weight = tl.zeros((1,), tl.float32)
    total_acc = tl.zeros((BLOCK_D,), tl.float32)
    one = tl.arange(0, 1)
    for split in range(first, own // SPLIT_KEYS + 1):
        slot = head_of_all * n_splits + split
        largest = tl.load(partial_scale + 2 * slot + one)
        weight = tl.load(partial_scale + 2 * slot + 1 + one)
        acc = tl.load(partial + slot * BLOCK_D + d, mask=is_d, other=0.0)
        new_largest = tl.maximum(total_largest, largest)
        base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        shrink, share = tl.exp2(total_largest - base), tl.exp2(largest - base)
        total_acc = total_acc * shrink + acc * share
        total_weight = total_weight * shrink + weight * share
        total_largest = new_largest
    result = total_acc / tl.where(total_weight > 0, total_weight, 1.0)
    tl.store(out + head_of_all * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=is_d)


class TreeAttention:
    """See `ddtree.kernels.exact_attention.TreeAttention`."""

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
        rows = depths.shape[1]
        self._block_table = block_table.contiguous()
        self._committed, self._depths = committed.contiguous(), depths.contiguous()
        self._above = ancestors_by_depth(depths, ancestors).int()
        # Where the row of every depth is the row of that number, keys stand at their own positions.
        row = torch.arange(rows, device=depths.device)
        in_order = (self._above == row) | (row > depths[..., None])
        self._chains = (in_order.all(-1) & (depths == row)).all(-1).int()
        self._page_tokens = page_tokens
        self._n_splits = triton.cdiv(context_bound + rows, SPLIT)
        self._workspace: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sliding_window: int | None
    ) -> torch.Tensor:
        """See the twin."""
        batch, rows, heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        query = query.contiguous()
        wide = query.dtype == torch.float32
        block_m, block_n = (16, 32) if wide else (64, 64)
        block_d = max(triton.next_power_of_2(head_dim), 16)
        slots = batch * rows * heads * self._n_splits
        is_parallel = self._n_splits > 1 and 4 * slots * block_d <= MAX_PARTIAL_BYTES
        out = torch.empty_like(query)
        partial, scale = self._scratch(slots, block_d) if is_parallel else (out, out)
        groups = heads // kv_heads
        grid = (triton.cdiv(rows * groups, block_m), kv_heads, batch * (self._n_splits if is_parallel else 1))
        has_window = sliding_window is not None
        _attention_kernel[grid](
            query, keys, values, out, partial, scale, self._block_table, self._committed, self._depths, self._above,
            self._chains, rows, kv_heads, self._block_table.stride(0), keys.stride(0),
            head_dim**-0.5 * 1.4426950408889634, sliding_window or 0, self._n_splits,
            GROUPS=groups, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=block_m, BLOCK_N=block_n, SPLIT_KEYS=SPLIT,
            PAGE=self._page_tokens, PARALLEL=is_parallel, HAS_SLIDING_WINDOW=has_window,
            PRECISION="ieee" if wide else "tf32",
            num_warps=8 if block_d >= 128 else 4, num_stages=2, enable_fp_fusion=False,
        )  # fmt: skip
        if is_parallel:
            _put_together_kernel[(batch * rows, heads)](
                partial, scale, self._committed, self._depths, out, rows, heads, sliding_window or 0, self._n_splits,
                HEAD_DIM=head_dim, BLOCK_D=block_d, SPLIT_KEYS=SPLIT, HAS_SLIDING_WINDOW=has_window,
                num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
        return out.view(batch, rows, heads * head_dim)

    def _scratch(self, slots: int, block_d: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the stretches leave, in memory that all layers of the pass share."""
        if self._workspace is None or self._workspace[0].numel() < slots * block_d:
            device = self._depths.device
            self._workspace = (torch.empty(slots * block_d, device=device), torch.empty(2 * slots, device=device))
        return self._workspace
