"""Where blocks are drafted, what they should say, and at which depths that is looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ddtree.train.packing import PackedRows


@dataclass(frozen=True)
class Anchors:
    """Blocks of one micro-batch; the anchor is the root of its block.

    Attributes:
        index: int64 ``[rows, anchors]``, ascending, index of the root in its row.
        valid: bool ``[rows, anchors]``, False where a row has too few places.
        roots: int64 ``[rows, anchors]``, the tokens there.
        starts: int64 ``[rows, anchors]``, where the anchor's conversation begins.
        labels: int64 ``[rows, anchors, depths]``, the token that the target wrote at each depth.
        label_valid: bool like ``labels``, whether the answer goes so far.
        teacher: int64 like ``labels``, index in the row whose next-token distribution speaks of that depth.
    """

    index: torch.Tensor
    valid: torch.Tensor
    roots: torch.Tensor
    starts: torch.Tensor
    labels: torch.Tensor
    label_valid: torch.Tensor
    teacher: torch.Tensor


def draw_anchors(rows: PackedRows, count: int, depths: int, generator: torch.Generator) -> Anchors:
    """``count`` random places a row among those where the answer goes on, without repetition."""
    row_tokens = rows.tokens.shape[1]
    here = torch.arange(row_tokens, device=rows.tokens.device)
    is_place = (here >= rows.answers) & (here + 1 < rows.ends)
    key = torch.rand(is_place.shape, device=here.device, generator=generator).masked_fill(~is_place, -1.0)
    index = key.topk(count, dim=1).indices.sort(dim=1).values
    ends = rows.ends.gather(1, index)
    at = index[..., None] + torch.arange(1, depths + 1, device=here.device)
    valid = is_place.gather(1, index)
    flat = at.clamp(max=row_tokens - 1).flatten(1)
    return Anchors(
        index=index,
        valid=valid,
        roots=rows.tokens.gather(1, index),
        starts=rows.starts.gather(1, index),
        labels=rows.tokens.gather(1, flat).view_as(at),
        label_valid=valid[..., None] & (at < ends[..., None]),
        teacher=(at - 1).clamp(max=row_tokens - 1),
    )


def depth_decay(depths: int, decay_tokens: float) -> torch.Tensor:
    """Weight of each depth, float32 ``[depths]``: 1 for the first, then falling."""
    return torch.exp(-torch.arange(depths) / decay_tokens)


@dataclass(frozen=True)
class DepthPlan:
    """How many of a row's anchors are looked at down to which depth.

    Every anchor is looked at from depth 1 to a depth of its own; which anchor gets which is drawn anew each time, the
    number of anchors for each depth is fixed. So each depth's chance is exact, and shapes never change.

    Attributes:
        reach: int64 ``[anchors]``, depths looked at, descending.
        chance: float32 ``[depths]``, share of anchors that are looked at so deep.
    """

    reach: torch.Tensor
    chance: torch.Tensor

    @property
    def rows(self) -> int:
        """Places looked at in one packed row."""
        return int(self.reach.sum())


def plan_depths(anchors: int, depths: int, share: float) -> DepthPlan:
    """A plan that looks at about ``share`` of all depths; the chance falls exponentially with depth."""
    counts = torch.full((depths,), anchors) if share == 1 else _counts(anchors, depths, share)
    reach = (torch.arange(anchors)[:, None] < counts).sum(dim=1)
    return DepthPlan(reach, counts / anchors)


def _counts(anchors: int, depths: int, share: float) -> torch.Tensor:
    low, high = 1e-3, 1e6
    depth = torch.arange(depths, dtype=torch.float64)
    for _ in range(100):
        middle = math.sqrt(low * high)
        if float(torch.exp(-depth / middle).mean()) < share:
            low = middle
        else:
            high = middle
    return (anchors * torch.exp(-depth / high)).round().long().clamp(min=1)


@dataclass(frozen=True)
class Looks:
    """The places of a micro-batch at which the loss is computed, anchor by anchor, shallow to deep.

    Attributes:
        anchor: int64 ``[rows, looks]``, number of the anchor in its row.
        depth: int64 ``[rows, looks]``, 0 for depth 1.
    """

    anchor: torch.Tensor
    depth: torch.Tensor


def draw_looks(plan: DepthPlan, rows: int, depths: int, generator: torch.Generator) -> Looks:
    """Deal the plan's reaches to the anchors of each row."""
    device = plan.reach.device
    anchors = len(plan.reach)
    deal = torch.rand(rows, anchors, device=device, generator=generator).argsort(dim=1)
    return looks_of(plan.reach[deal], depths, plan.rows)


def looks_of(reach: torch.Tensor, depths: int, count: int) -> Looks:
    """Places of anchors that are looked at down to ``reach`` (``[rows, anchors]``), ``count`` in each row."""
    taken = torch.arange(depths, device=reach.device) < reach[..., None]
    rank = taken.flatten(1).cumsum(dim=1) - 1
    flat = torch.arange(taken[0].numel(), device=reach.device).expand(len(reach), -1)
    # What is not taken goes to a place behind the last, which is cut off: shapes stay fixed, the host never waits.
    places = flat.new_empty(len(reach), count + 1).scatter_(1, torch.where(taken.flatten(1), rank, count), flat)
    places = places[:, :count]
    return Looks(places // depths, places % depths)
