"""What a round begins with, in one launch."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl

from ddtree.sglang.round_start import RoundStart


@triton.jit
def _start_kernel(
    roots, committed, request_rows, table, block_ids, block_positions, out_slots,
    table_width, block_size, slots, mask_token_id, WIDTH: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    position = tl.load(committed + sequence).to(tl.int64) + column
    in_block = column < block_size
    token = tl.where(column == 0, tl.load(roots + sequence).to(tl.int64), mask_token_id)
    tl.store(block_ids + sequence * block_size + column, token, mask=in_block)
    tl.store(block_positions + sequence * block_size + column, position, mask=in_block)
    row = tl.load(request_rows + sequence).to(tl.int64)
    place = tl.minimum(position, table_width - 1)
    slot = tl.load(table + row * table_width + place, mask=column < slots, other=0)
    tl.store(out_slots + sequence * slots + column, slot.to(tl.int64), mask=column < slots)


def start_round(
    roots: torch.Tensor,
    committed: torch.Tensor,
    request_rows: torch.Tensor,
    request_to_token: torch.Tensor,
    block_size: int,
    slots: int,
    mask_token_id: int,
) -> RoundStart:
    """See `ddtree.sglang.round_start.start_round`."""
    batch, device = len(roots), roots.device
    # Each in memory of its own: Triton compiles anew for pointers of another alignment.
    block_ids = torch.empty(batch, block_size, dtype=torch.int64, device=device)
    block_positions = torch.empty_like(block_ids)
    out_slots = torch.empty(batch, slots, dtype=torch.int64, device=device)
    _start_kernel[(batch,)](
        roots.contiguous(), committed.contiguous(), request_rows.contiguous(), request_to_token,
        block_ids, block_positions, out_slots, request_to_token.stride(0), block_size, slots, mask_token_id,
        WIDTH=triton.next_power_of_2(max(block_size, slots)),
    )  # fmt: skip
    return RoundStart(block_ids, block_positions, out_slots)
