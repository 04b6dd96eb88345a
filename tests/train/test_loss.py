"""The loss and its gradient against plain autograd, and the expectation of a loss that looks at some depths only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, log_softmax

from ddtree.kernels import draft_loss
from ddtree.kernels.draft_loss import Distributions
from ddtree.train import loss as loss_module
from ddtree.train.anchors import Anchors, Looks, depth_decay, looks_of, plan_depths
from ddtree.train.loss import BlockLoss, LossOfBlocks
from ddtree.train.settings import Objective
from devices import DEVICE, DTYPES, close, needs_triton

ROWS, ROW_TOKENS, COUNT, BLOCK, HIDDEN, VOCAB = 3, 20, 4, 6, 8, 13
DEPTHS = BLOCK - 1
WHOLE = plan_depths(COUNT, DEPTHS, 1.0)
EVERYWHERE = looks_of(WHOLE.reach.expand(ROWS, -1), DEPTHS, WHOLE.rows)


class Made:
    """A micro-batch of random numbers; one answer ends within a block, one anchor is not valid."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(ROWS, COUNT, BLOCK, HIDDEN, generator=draw)
        self.last = torch.randn(ROWS, ROW_TOKENS, HIDDEN, generator=draw)
        self.head = torch.randn(VOCAB, HIDDEN, generator=draw)
        labels = torch.randint(0, VOCAB, (ROWS, COUNT, DEPTHS), generator=draw)
        label_valid = torch.ones_like(labels, dtype=torch.bool)
        label_valid[1, 2, 3:] = False
        label_valid[2, 3] = False
        none = torch.zeros(ROWS, COUNT, dtype=torch.int64)
        teacher = torch.randint(0, ROW_TOKENS, labels.shape, generator=draw)
        self.anchors = Anchors(none, label_valid[..., 0], none, none, labels, label_valid, teacher)

    def loss(
        self, objective: Objective, looks: Looks = EVERYWHERE, plan: Any = WHOLE
    ) -> tuple[BlockLoss, torch.Tensor]:
        """The loss, and its gradient of the hidden states."""
        hidden = self.hidden.clone().requires_grad_()
        last = self.last if objective.needs_distribution else None
        at_looks = hidden[torch.arange(ROWS)[:, None], looks.anchor, looks.depth + 1]
        result = LossOfBlocks(objective, plan, self.head)(at_looks, last, self.anchors, looks)
        result.total.backward()
        assert hidden.grad is not None
        return result, hidden.grad

    def plain_loss(self, objective: Objective) -> tuple[torch.Tensor, torch.Tensor]:
        """Written from the definition, place by place."""
        hidden = self.hidden.clone().requires_grad_()
        said = log_softmax(hidden[:, :, 1:] @ self.head.T, dim=-1)
        total, norm = torch.zeros(()), 0.0
        for row in range(ROWS):
            for anchor in range(COUNT):
                reach = 1.0
                for depth in range(DEPTHS):
                    if not self.anchors.label_valid[row, anchor, depth]:
                        continue
                    log_q = said[row, anchor, depth]
                    label = self.anchors.labels[row, anchor, depth]
                    weight = float(torch.exp(torch.tensor(-depth / objective.decay_tokens)))
                    norm += weight
                    weight *= 1 - objective.reach_share + objective.reach_share * reach
                    reach *= float(log_q[label].detach().exp())
                    token = -log_q[label]
                    wanted = self.last[row, self.anchors.teacher[row, anchor, depth]] @ self.head.T
                    if objective.kept_tokens is not None:
                        least = wanted.sort(descending=True).values[objective.kept_tokens - 1]
                        wanted = wanted.masked_fill(wanted < least, -torch.inf)
                    p = wanted.softmax(dim=-1)
                    divergence = torch.where(p > 0, p * (p.clamp(min=1e-30).log() - log_q), 0.0).sum()
                    total = total + weight * (objective.token_share * token + (1 - objective.token_share) * divergence)
        (total / norm).backward()
        assert hidden.grad is not None
        return (total / norm).detach(), hidden.grad


OBJECTIVES = {
    "tokens": Objective(token_share=1, head_share=1),
    "distributions": Objective(token_share=0, head_share=1),
    "both": Objective(token_share=0.3, decay_tokens=2, head_share=1),
    "top k": Objective(token_share=0.5, distribution="top_k", top_k=4, head_share=1),
    "argmax": Objective(token_share=0, distribution="argmax", head_share=1),
    "weighed by reach": Objective(token_share=0.5, reach_share=0.7, decay_tokens=100, head_share=1),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 30], ids=["row by row", "all at once"])
def test_loss_and_gradient(name: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk_bytes)
    made = Made()
    (loss, gradient), (wanted_loss, wanted_gradient) = made.loss(OBJECTIVES[name]), made.plain_loss(OBJECTIVES[name])
    torch.testing.assert_close(loss.total, wanted_loss)
    torch.testing.assert_close(gradient, wanted_gradient)


def test_cross_entropy_is_torchs() -> None:
    made = Made()
    whole = replace(made.anchors, label_valid=torch.ones_like(made.anchors.label_valid))
    made.anchors = whole
    loss, _ = made.loss(Objective(token_share=1, decay_tokens=1e9, head_share=1))
    logits = (made.hidden[:, :, 1:] @ made.head.T).flatten(0, 2)
    torch.testing.assert_close(loss.total, cross_entropy(logits, whole.labels.flatten()))


@pytest.mark.parametrize("reach_share", [0.0, 0.6])
def test_looking_at_some_depths_leaves_the_expected_loss_and_gradient(reach_share: float) -> None:
    """Dealing a plan's reaches out in turn gives each anchor each of them once: the mean is the expectation."""
    made = Made()
    objective = Objective(token_share=0.5, reach_share=reach_share, head_share=0.5)
    plan = plan_depths(COUNT, DEPTHS, 0.5)
    assert plan.rows < COUNT * DEPTHS * 0.7
    whole, whole_gradient = made.loss(objective.model_copy(update={"head_share": 1.0}))
    totals, gradients = [], []
    for turn in range(COUNT):
        looks = looks_of(plan.reach.roll(turn).expand(ROWS, -1), DEPTHS, plan.rows)
        loss, gradient = made.loss(objective, looks, plan)
        totals.append(loss.total.detach())
        gradients.append(gradient)
    assert torch.stack(totals).std() > 0
    torch.testing.assert_close(torch.stack(totals).mean(), whole.total.detach())
    torch.testing.assert_close(torch.stack(gradients).mean(dim=0), whole_gradient)


def test_sums_by_depth_count_what_they_say() -> None:
    made = Made()
    loss, _ = made.loss(Objective(token_share=0.5, head_share=1))
    said = made.hidden[:, :, 1:] @ made.head.T
    hits = (said.argmax(dim=-1) == made.anchors.labels) & made.anchors.label_valid
    counted = made.anchors.label_valid.sum(dim=(0, 1)).float()
    reached = hits.long().cumprod(dim=2).sum(dim=(0, 1)).float()
    assert torch.equal(loss.by_depth[0], counted)
    assert torch.equal(loss.by_depth[3], hits.sum(dim=(0, 1)).float())
    assert torch.equal(loss.by_depth[4], reached)
    token = -log_softmax(said, dim=-1).gather(3, made.anchors.labels[..., None])[..., 0]
    torch.testing.assert_close(loss.by_depth[1], (token * made.anchors.label_valid).sum(dim=(0, 1)))


def test_a_plan_looks_at_the_share_asked_for_and_at_every_depth() -> None:
    for share in (0.2, 0.5, 0.9):
        plan = plan_depths(512, 15, share)
        assert plan.rows == pytest.approx(share * 512 * 15, rel=0.02)
        assert plan.chance[0] == 1 and plan.chance[-1] > 0
        assert (plan.chance.diff() <= 0).all()
    assert plan_depths(7, 3, 1.0).reach.tolist() == [3] * 7


def test_decay_falls_from_one() -> None:
    decay = depth_decay(3, 4.0)
    assert decay.tolist() == pytest.approx([1.0, 0.7788008, 0.6065307])


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [None, 1, 5])
@pytest.mark.parametrize("token_share", [0.0, 0.5, 1.0])
def test_fast_kernels(dtype: torch.dtype, kept: int | None, token_share: float) -> None:
    from ddtree.kernels import draft_loss_triton as fast

    draw = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(5, 9001, generator=draw)).to(DEVICE, dtype)
    logits[2, [100, 7000]] = 30.0  # the first among equals is the top
    wanted_logits = (3 * torch.randn(7, 9001, generator=draw)).to(DEVICE, dtype)
    labels = torch.tensor([1, 9000, 5000, 4096, 77], device=DEVICE)
    everything = torch.full((7,), -torch.inf, device=DEVICE)
    least = everything if kept is None else wanted_logits.topk(kept, dim=1).values[:, -1].float()
    slow_statistics = draft_loss.row_statistics(logits, labels, everything[:5])
    for got, want in zip(fast.row_statistics(logits, labels, everything[:5]), slow_statistics, strict=True):
        close(got, want)
    label_of_wanted = torch.zeros(7, dtype=torch.int64, device=DEVICE)
    log_sums = fast.row_statistics(wanted_logits, label_of_wanted, least)[0]
    close(log_sums, draft_loss.row_statistics(wanted_logits, label_of_wanted, least)[0])
    wanted = Distributions(wanted_logits, least, log_sums) if token_share < 1 else None
    weights = torch.tensor([0.5, 1.0, 0.0, 2.0, 0.1], device=DEVICE)
    row = torch.tensor([6, 0, 3, 3, 2], device=DEVICE)
    slow_gradient, fast_gradient = logits.clone(), logits.clone()
    arguments = (slow_statistics[0], labels, weights, token_share, wanted, row)
    want = draft_loss.replace_by_gradient(slow_gradient, *arguments)
    close(fast.replace_by_gradient(fast_gradient, *arguments), want)
    close(fast_gradient, slow_gradient)
