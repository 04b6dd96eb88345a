"""What an accepted path leaves behind: which K/V slots move where, and which rows' taps are kept (slow twin)."""

from dataclasses import dataclass

import torch

from ddtree.kernels.tree_walk import AcceptedPaths


@dataclass(frozen=True)
class Commit:
    """Per sequence ``depths + 1`` places of the path, the root first; what lies behind the accepted ones is padding.

    Attributes:
        lengths: int32 ``[batch]``, committed tokens of this round: the root and the accepted nodes.
        committed: int64 ``[batch]``, cached tokens after this round.
        source, target: int64 ``[batch, depths + 1]``, K/V slots to move from and to; equal in the padding.
        positions: int64 ``[batch, depths + 1]``.
        rows: int64 ``[batch * (depths + 1)]``, rows of the verify pass, counted over the whole batch.
    """

    lengths: torch.Tensor
    committed: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor


def commit_paths(paths: AcceptedPaths, committed: torch.Tensor, slots: torch.Tensor, width: int) -> Commit:
    """Lay out the commit of a batch.

    Args:
        paths: what the target accepted.
        committed: int64 ``[batch]``, cached tokens before this round.
        slots: int64 ``[batch, at least width]``, K/V slot of every row.
        width: rows a sequence.
    """
    batch, steps = paths.rows.shape
    step = torch.arange(steps, device=slots.device)
    target = slots[:, :steps]
    source = torch.where(step <= paths.accepted[:, None], slots.gather(1, paths.rows), target)
    first_row = torch.arange(batch, device=slots.device)[:, None] * width
    lengths = paths.accepted + 1
    return Commit(
        lengths=lengths.int(),
        committed=committed + lengths,
        source=source,
        target=target.contiguous(),
        positions=committed[:, None] + step,
        rows=(paths.rows + first_row).flatten(),
    )
