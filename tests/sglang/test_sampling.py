"""Choices at each row have the law of SGLang's own sampler: same tokens allowed, same probabilities."""

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from ddtree.kernels.tree_tensors import root_only
from ddtree.sglang.kernel_choice import choose_kernels
from ddtree.sglang.sampling import allowed_tokens, choose_tokens

KERNELS = choose_kernels(torch.device("cpu"))


def info(batch: int, **changed) -> SimpleNamespace:
    plain = {
        "is_all_greedy": False, "logit_bias": None, "temperatures": torch.ones(batch, 1),
        "top_ks": torch.full((batch,), 1 << 30, dtype=torch.int32), "top_ps": torch.ones(batch),
        "min_ps": torch.zeros(batch), "need_top_k_sampling": False, "need_top_p_sampling": False,
        "need_min_p_sampling": False,
    }  # fmt: skip
    return SimpleNamespace(**plain | changed)


def plain_filter(probs: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """What SGLang's torch sampler keeps of one distribution, in its own words: sums over the whole distribution."""
    values, ids = probs.sort(descending=True)
    kept = [
        rank for rank in range(len(values))
        if rank < top_k and float(values[:rank].sum()) <= top_p and float(values[rank]) >= float(values[0]) * min_p
    ]  # fmt: skip
    return ids[kept].sort().values


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(3, 1.0, 0.0), (50, 0.7, 0.0), (6, 0.8, 0.2), (1 << 30, 1.0, 0.3)]
)
def test_filters_keep_what_sglang_keeps(top_k, top_p, min_p) -> None:
    torch.manual_seed(0)
    probs = torch.randn(3, 4, 11).mul(2).softmax(-1)
    full = (torch.full((3,), v) for v in (top_k, top_p, min_p))
    got = allowed_tokens(probs, *full, sequential=False)
    for row, kept in zip(probs.view(-1, 11), got.view(-1, 11), strict=True):
        assert kept.nonzero().flatten().tolist() == plain_filter(row, top_k, top_p, min_p).tolist()


def test_filters_in_turn_look_at_what_is_left() -> None:
    probs = torch.tensor([[[0.4, 0.3, 0.2, 0.1]]])
    arguments = torch.tensor([2]), torch.tensor([0.5]), torch.tensor([0.0])
    # Of 0.4 and 0.3 alone the first holds 0.57 > 0.5; of all four it holds 0.4, so that the second may come.
    assert allowed_tokens(probs, *arguments, sequential=True)[0, 0].tolist() == [True, False, False, False]
    assert allowed_tokens(probs, *arguments, sequential=False)[0, 0].tolist() == [True, True, False, False]


def test_greedy_rows_of_a_sampled_batch_take_the_argmax() -> None:
    logits = torch.tensor([[[0.0, 5.0, 4.9]], [[0.0, 5.0, 4.9]]])
    tree, committed = root_only(torch.tensor([1, 2])), torch.tensor([3, 4])
    mixed = info(2, top_ks=torch.tensor([1, 1 << 30], dtype=torch.int32), temperatures=torch.tensor([[1.0], [9.0]]))
    drawn = torch.stack([choose_tokens(logits, mixed, tree, committed, seed, KERNELS)[:, 0] for seed in range(60)])
    assert (drawn[:, 0] == 1).all()
    assert len(drawn[:, 1].unique()) == 3


def test_bias_counts_for_greedy_too() -> None:
    logits, tree = torch.zeros(1, 1, 4), root_only(torch.tensor([0]))
    biased = info(1, is_all_greedy=True, logit_bias=torch.tensor([[0.0, 0.0, 2.0, 0.0]]))
    assert choose_tokens(logits, biased, tree, torch.tensor([0]), 0, KERNELS).item() == 2


def test_draws_have_the_targets_probabilities() -> None:
    """Over rounds and over the requests of one batch; a shared draw would show as a jump in the counts."""
    torch.manual_seed(2)
    batch, vocab, rounds = 8, 6, 250
    logits = torch.randn(vocab).expand(batch, 1, vocab)
    tree, committed = root_only(torch.zeros(batch, dtype=torch.int64)), torch.full((batch,), 7)
    warm = info(batch, temperatures=torch.full((batch, 1), 0.7), need_top_k_sampling=True,
                top_ks=torch.full((batch,), 4, dtype=torch.int32))  # fmt: skip
    drawn = torch.cat([choose_tokens(logits, warm, tree, committed, seed, KERNELS) for seed in range(rounds)])
    scaled = logits[0, 0] / 0.7
    wanted = scaled.masked_fill(scaled < scaled.topk(4).values[-1], -torch.inf).softmax(-1)
    counts = torch.bincount(drawn.flatten(), minlength=vocab)
    assert counts[wanted == 0].sum() == 0
    live = wanted > 0
    assert (
        chisquare(counts[live].numpy(), (wanted[live] * counts.sum()).double().numpy(), sum_check=False).pvalue > 1e-3
    )
    per_round = drawn.view(rounds, batch)
    assert (per_round != per_round[:, :1]).any(1).float().mean() > 0.9, "requests of a batch draw alike"
