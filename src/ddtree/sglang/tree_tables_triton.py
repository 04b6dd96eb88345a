"""The tables of a tree's rows for FlashAttention, one program a row."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["real_rows"])
def _tree_tables_kernel(
    slots, ancestors, table, lengths, real_rows, rows, slots_stride, table_stride, ROWS: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    if at >= real_rows:
        tl.store(lengths + at, 1)
        return
    node = tl.arange(0, ROWS)
    inside = node < rows
    seen = tl.load(ancestors + at * rows + node, mask=inside, other=0).to(tl.int32)
    slot = tl.load(slots + at // rows * slots_stride + node, mask=inside, other=0).to(tl.int32)
    before, count = tl.cumsum(seen, axis=0) - seen, tl.sum(seen, axis=0)
    tl.store(table + at * table_stride + tl.where(seen > 0, before, count + node - before), slot, mask=inside)
    tl.store(lengths + at, count)


def write_tree_tables(slots: torch.Tensor, ancestors: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> None:
    """See `ddtree.sglang.tree_tables.write_tree_tables`."""
    batch, rows, _ = ancestors.shape
    _tree_tables_kernel[(len(lengths),)](
        slots, ancestors.contiguous().view(torch.uint8), table, lengths, batch * rows, rows,
        slots.stride(0), table.stride(0), ROWS=triton.next_power_of_2(rows),
    )  # fmt: skip
