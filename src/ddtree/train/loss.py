"""The loss of drafted blocks, and its gradient, a few packed rows at a time.

The head is the target's and frozen, so the gradient of the logits is needed only to be multiplied with the head once
more: it is made in the forward pass, over the logits, and no row of logits outlives its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ddtree.kernels import draft_loss
from ddtree.kernels.draft_loss import Distributions
from ddtree.train.anchors import Anchors, DepthPlan, Looks, depth_decay
from ddtree.train.settings import Objective

CHUNK_BYTES = 3 << 29
STATISTICS = ("looks", "token_loss", "divergence", "hits", "reached")


@dataclass(frozen=True)
class BlockLoss:
    """The loss of one micro-batch.

    Attributes:
        total: scalar to differentiate.
        by_depth: float32 ``[5, depths]``, not differentiable, sums over the places looked at, in the order of
            `STATISTICS`: their number, cross-entropy with the target's token, divergence from its distribution, places
            at which the drafter's likeliest token is the target's, and those at which that holds of all depths so far.
    """

    total: torch.Tensor
    by_depth: torch.Tensor


class LossOfBlocks:
    """Computes the loss of micro-batches.

    Args:
        head: ``[vocab, hidden]`` of the target.
        plan: how deep anchors are looked at; its tensors on the head's device.
    """

    def __init__(self, objective: Objective, plan: DepthPlan, head: torch.Tensor) -> None:
        self._objective, self._head = objective, head
        self._decay = depth_decay(len(plan.chance), objective.decay_tokens).to(head.device)
        self._chance = plan.chance.to(head.device)

    def __call__(self, hidden: torch.Tensor, last: torch.Tensor | None, anchors: Anchors, looks: Looks) -> BlockLoss:
        """Loss of blocks.

        Args:
            hidden: ``[rows, looks, hidden]``, from `DraftPass`.
            last: ``[rows, row_tokens, hidden]`` of the target, where the objective needs distributions.
            looks: the places.
        """
        norm = (anchors.label_valid * self._decay).sum().clamp(min=1e-6)
        at_depth = self._decay / self._chance / norm
        flat = looks.anchor * anchors.labels.shape[2] + looks.depth
        places = _Places(
            anchors=anchors.labels.shape[1],
            depths=anchors.labels.shape[2],
            looks=looks,
            labels=anchors.labels.flatten(1).gather(1, flat),
            is_valid=anchors.label_valid.flatten(1).gather(1, flat),
            teacher=anchors.teacher.flatten(1).gather(1, flat),
            depth_weight=at_depth[looks.depth],
        )
        total, by_depth = _Loss.apply(hidden, last, self._head, places, self._objective)
        return BlockLoss(total, by_depth)


@dataclass(frozen=True)
class _Places:
    """`Looks` with what is known of each place; all ``[rows, looks]``. Rows have so many ``anchors`` and ``depths``."""

    anchors: int
    depths: int
    looks: Looks
    labels: torch.Tensor
    is_valid: torch.Tensor
    teacher: torch.Tensor
    depth_weight: torch.Tensor

    def part(self, first: int, end: int) -> _Places:
        """Some packed rows."""
        cut = slice(first, end)
        looks = Looks(self.looks.anchor[cut], self.looks.depth[cut])
        known = (self.labels[cut], self.is_valid[cut], self.teacher[cut], self.depth_weight[cut])
        return _Places(self.anchors, self.depths, looks, *known)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        last: torch.Tensor | None,
        head: torch.Tensor,
        places: _Places,
        objective: Objective,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_depth = torch.zeros(len(STATISTICS), places.depths, device=hidden.device)
        total = torch.zeros((), device=hidden.device)
        rows = _rows_a_chunk(places, last, head)
        for first in range(0, len(hidden), rows):
            end = min(first + rows, len(hidden))
            loss, chunk_depths = _chunk(
                hidden[first:end], None if last is None else last[first:end], head, places.part(first, end), objective,
                None if gradient is None else gradient[first:end],
            )  # fmt: skip
            total += loss
            by_depth += chunk_depths
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(by_depth)
        return total, by_depth

    @staticmethod
    def backward(ctx: Any, of_total: torch.Tensor, of_depths: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_total.to(gradient.dtype), None, None, None, None


def _rows_a_chunk(places: _Places, last: torch.Tensor | None, head: torch.Tensor) -> int:
    rows_of_logits = places.labels.shape[1] + (0 if last is None else last.shape[1])
    return max(1, CHUNK_BYTES // (rows_of_logits * head.shape[0] * head.element_size()))


def _chunk(
    hidden: torch.Tensor,
    last: torch.Tensor | None,
    head: torch.Tensor,
    places: _Places,
    objective: Objective,
    gradient: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and sums by depth of a few packed rows; their gradient goes to ``gradient``."""
    rows, _, size = hidden.shape
    anchor = torch.arange(rows, device=hidden.device)[:, None] * places.anchors + places.looks.anchor
    by_anchor = (anchor * places.depths + places.looks.depth).flatten()
    labels, is_valid, depth = places.labels.flatten(), places.is_valid.flatten(), places.looks.depth.flatten()
    logits = hidden.reshape(-1, size) @ head.T
    kernels: Any = _kernels(logits.device)
    everything = torch.full((len(logits),), -torch.inf, device=logits.device)
    log_sums, label_logits, tops = kernels.row_statistics(logits, labels, everything)
    token_loss = log_sums - label_logits

    def over_depths(values: torch.Tensor) -> torch.Tensor:
        """``[rows * anchors, depths]``, zero at depths not looked at."""
        spread = torch.zeros(rows * places.anchors * places.depths, device=hidden.device)
        return spread.scatter_(0, by_anchor, values.float()).view(-1, places.depths)

    losses = over_depths(token_loss)
    reach = (losses - losses.cumsum(dim=1)).exp().flatten()[by_anchor]  # of the depths before, without its own
    weights = places.depth_weight.flatten() * is_valid * (1 - objective.reach_share * (1 - reach))

    wanted, wanted_row = None, places.teacher.flatten()
    if last is not None:
        wanted = _distributions(last.reshape(-1, size) @ head.T, objective.kept_tokens, kernels)
        from_row = torch.arange(rows, device=hidden.device)[:, None] * last.shape[1]
        wanted_row = (from_row + places.teacher).flatten()
    divergence = kernels.replace_by_gradient(
        logits, log_sums, labels, weights, objective.token_share, wanted, wanted_row
    )
    loss = (weights * (objective.token_share * token_loss + (1 - objective.token_share) * divergence)).sum()
    hits = (tops == labels) & is_valid
    reached = over_depths(hits).cumprod(dim=1).flatten()[by_anchor]
    sums = torch.stack([is_valid.float(), token_loss * is_valid, divergence * is_valid, hits.float(), reached])
    by_depth = torch.zeros(len(sums), places.depths, device=hidden.device).index_add_(1, depth, sums)
    if gradient is not None:
        torch.mm(logits, head, out=gradient.view(-1, size))
    return loss, by_depth


def _distributions(logits: torch.Tensor, kept_tokens: int | None, kernels: Any) -> Distributions:
    least = torch.full((len(logits),), -torch.inf, device=logits.device)
    if kept_tokens is not None and kept_tokens < logits.shape[1]:
        least = logits.topk(kept_tokens, dim=1).values[:, -1].float()
    any_label = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return Distributions(logits, least, kernels.row_statistics(logits, any_label, least)[0])


def _kernels(device: torch.device) -> Any:
    """The kernels for a device: Triton's on a GPU, the twins elsewhere."""
    if device.type != "cuda":
        return draft_loss
    from ddtree.kernels import draft_loss_triton

    return draft_loss_triton
