"""What an accepted path leaves behind, in one launch."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl

from ddtree.kernels.tree_walk import AcceptedPaths
from ddtree.sglang.commit import Commit


@triton.jit
def _commit_kernel(
    path_rows, accepted, committed, slots, lengths, new_committed, source, target, positions, rows,
    slot_stride, steps, width, STEPS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, STEPS)
    inside = step < steps
    nodes = tl.load(accepted + sequence)
    before = tl.load(committed + sequence)
    row = tl.load(path_rows + sequence * steps + step, mask=inside, other=0)
    front = tl.load(slots + sequence * slot_stride + step, mask=inside, other=0)
    behind = tl.load(slots + sequence * slot_stride + row, mask=inside, other=0)
    place = sequence * steps + step
    tl.store(source + place, tl.where(step <= nodes, behind, front), mask=inside)
    tl.store(target + place, front, mask=inside)
    tl.store(positions + place, before + step, mask=inside)
    tl.store(rows + place, row + sequence * width, mask=inside)
    tl.store(lengths + sequence, (nodes + 1).to(tl.int32))
    tl.store(new_committed + sequence, before + nodes + 1)


def commit_paths(paths: AcceptedPaths, committed: torch.Tensor, slots: torch.Tensor, width: int) -> Commit:
    """See `ddtree.sglang.commit.commit_paths`."""
    batch, steps = paths.rows.shape
    device = slots.device
    lengths = torch.empty(batch, dtype=torch.int32, device=device)
    new_committed = torch.empty(batch, dtype=torch.int64, device=device)
    # Each in memory of its own: Triton compiles anew for pointers of another alignment.
    source, target, positions, rows = (torch.empty(batch, steps, dtype=torch.int64, device=device) for _ in range(4))
    _commit_kernel[(batch,)](
        paths.rows.contiguous(), paths.accepted.contiguous(), committed.contiguous(), slots,
        lengths, new_committed, source, target, positions, rows,
        slots.stride(0), steps, width, STEPS=triton.next_power_of_2(steps),
    )  # fmt: skip
    return Commit(lengths, new_committed, source, target, positions, rows.flatten())
