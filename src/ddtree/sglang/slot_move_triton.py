"""Moving the K/V of accepted paths to their places in an SGLang pool, all layers in one launch.

A path's slots are both read and written: slot 2 may be the source of step 1 and the target of step 2. One program owns
a strip of bytes of one sequence and goes down the path step by step, so a slot is read before it is overwritten: the
row of step ``j`` never stands before place ``j``.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl


@triton.jit
def _move_kernel(pointers, strides, source, target, lengths, steps, UNIT: tl.constexpr, STRIP: tl.constexpr):
    buffer = tl.program_id(0)
    sequence = tl.program_id(2)
    stride = tl.load(strides + buffer).to(tl.int64)
    base = tl.load(pointers + buffer).to(tl.pointer_type(tl.int32 if UNIT == 4 else tl.uint8))
    units = stride // UNIT
    column = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    inside = column < units
    for step in range(1, tl.load(lengths + sequence)):
        read_from = tl.load(source + sequence * steps + step)
        write_to = tl.load(target + sequence * steps + step)
        if read_from != write_to:
            values = tl.load(base + read_from * units + column, mask=inside, other=0)
            tl.store(base + write_to * units + column, values, mask=inside)


def move_slots(
    pointers: torch.Tensor,
    strides: torch.Tensor,
    slot_bytes: int,
    source: torch.Tensor,
    target: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Copy slots within each buffer.

    Args:
        pointers: uint64 ``[buffers]``, addresses of the buffers; a buffer is ``[slots, ...]`` without gaps.
        strides: int64 ``[buffers]``, bytes of one slot.
        slot_bytes: the largest of ``strides``.
        source, target: int64 ``[batch, steps]`` as in `ddtree.sglang.commit.Commit`.
        lengths: int32 ``[batch]``; steps from there on stay, and so does step 0, the root.
    """
    batch, steps = source.shape
    unit = 4 if slot_bytes % 4 == 0 else 1
    strip = min(triton.next_power_of_2(slot_bytes // unit), 512)
    grid = (len(pointers), triton.cdiv(slot_bytes // unit, strip), batch)
    _move_kernel[grid](
        pointers.view(torch.int64), strides, source, target, lengths, steps, UNIT=unit, STRIP=strip, num_warps=4
    )
