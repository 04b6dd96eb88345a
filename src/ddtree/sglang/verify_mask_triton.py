"""The attention mask of a verify pass in SGLang's layout, one program a row; lengths are read on the device."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl


@triton.jit
def _verify_mask_kernel(ancestors, committed, out, rows, BATCH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    sequence = tl.program_id(0)
    row = tl.program_id(1)
    before = tl.arange(0, BATCH)
    lengths = tl.load(committed + before, mask=before < sequence, other=0)
    length = tl.load(committed + sequence).to(tl.int64)
    start = rows * (tl.sum(lengths, axis=0).to(tl.int64) + sequence * rows) + row * (length + rows)
    column = tl.arange(0, BLOCK)
    ones = tl.full((BLOCK,), 1, tl.uint8)
    for first in range(0, length, BLOCK):
        tl.store(out + start + first + column, ones, mask=first + column < length)
    node = tl.arange(0, ROWS)
    seen = tl.load(ancestors + (sequence * rows + row) * rows + node, mask=node < rows, other=0)
    tl.store(out + start + length + node, seen, mask=node < rows)


def write_verify_mask(ancestors: torch.Tensor, committed: torch.Tensor, out: torch.Tensor) -> None:
    """See `ddtree.sglang.verify_mask.write_verify_mask`."""
    batch, rows, _ = ancestors.shape
    _verify_mask_kernel[(batch, rows)](
        ancestors.contiguous().view(torch.uint8), committed.contiguous(), out.view(torch.uint8), rows,
        BATCH=max(triton.next_power_of_2(batch), 64), ROWS=triton.next_power_of_2(rows), BLOCK=1024,
    )  # fmt: skip
