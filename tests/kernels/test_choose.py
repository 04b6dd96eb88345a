"""Choices at the rows of a tree against transformers' logits processors, applied to each row's own path."""

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ddtree.kernels.choose import SamplingTensors, choose
from ddtree.kernels.noise import gumbel_noise, seed_key
from ddtree.kernels.tree_build import build_tree

VOCAB = 40


def sampling(
    batch, *, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition=1.0, presence=0.0, frequency=0.0,
    prompts=None, outputs=None,
):  # fmt: skip
    def row(value, dtype=torch.float32):
        return torch.full((batch,), value, dtype=dtype)

    counts = in_prompt = None
    if prompts is not None:
        counts = torch.stack([torch.bincount(torch.tensor(o), minlength=VOCAB) for o in outputs]).int()
        in_prompt = torch.stack([torch.bincount(torch.tensor(p), minlength=VOCAB) > 0 for p in prompts])
    return SamplingTensors(
        temperature=row(temperature), top_k=row(top_k, torch.int64), top_p=row(top_p), min_p=row(min_p),
        repetition=row(repetition), presence=row(presence), frequency=row(frequency),
        seed_keys=torch.tensor([seed_key(s) for s in range(batch)], dtype=torch.int32),
        output_counts=counts, in_prompt=in_prompt, any_sampled=temperature > 0,
        any_filtered=top_k > 0 or top_p < 1 or min_p > 0,
    )  # fmt: skip


def random_tree(batch=2, budget=12):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(batch, 4, 5, generator=generator)
    log_probs = logits.log_softmax(-1).sort(descending=True).values
    tokens = torch.stack([torch.randperm(VOCAB, generator=generator)[:5] for _ in range(batch * 4)])
    roots = torch.tensor([11, 12])[:batch]
    return build_tree(log_probs, tokens.view(batch, 4, 5), roots, budget, torch.full((batch,), 4))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(7, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (9, 0.8, 0.05), (1, 0.1, 0.9)]
)
def test_filters_equal_transformers(top_k, top_p, min_p):
    tree, temperature = random_tree(), 0.7
    logits = torch.randn(2, 13, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    committed = torch.tensor([50, 60])
    got = choose(logits, sampling(2, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), tree, committed)

    scores = (logits / temperature).view(-1, VOCAB)
    warpers = [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        scores = warper(None, scores)
    keys = torch.tensor([seed_key(0), seed_key(1)], dtype=torch.int32)
    noise = gumbel_noise(keys, committed[:, None] + tree.depths + 1, VOCAB)
    assert torch.equal(got, (scores.view(2, 13, VOCAB) + noise).argmax(-1))


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.3, 0.0, 0.0), (0.8, 0.0, 0.0), (1.0, 0.7, 0.0), (1.2, 0.5, 0.9)]
)
def test_penalties_follow_each_nodes_own_path(repetition, presence, frequency):
    tree = random_tree()
    prompts, outputs = [[1, 2, 3, 3], [4, 5]], [[9, 9, 11], [8, 12]]  # each output ends with the root
    logits = torch.randn(2, 13, VOCAB, generator=torch.Generator().manual_seed(1)) * 0.5
    params = sampling(
        2, repetition=repetition, presence=presence, frequency=frequency, prompts=prompts, outputs=outputs
    )
    got = choose(logits, params, tree, torch.tensor([6, 3]))
    for b in range(2):
        oracle = tree.to_draft_tree(b)
        for row in range(len(oracle) + 1):
            generated = outputs[b] + (oracle.tokens_to(row - 1) if row else [])
            whole = torch.tensor([prompts[b] + generated])
            scores = RepetitionPenaltyLogitsProcessor(repetition)(whole, logits[b, row][None].clone())[0]
            for token in range(VOCAB):
                count = generated.count(token)
                scores[token] -= frequency * count + presence * (count > 0)
            assert int(got[b, row]) == int(scores.argmax()), (b, row)


def test_greedy_ties_go_to_the_lower_token():
    logits = torch.zeros(2, 13, VOCAB)
    logits[..., 20] = logits[..., 30] = 5.0
    assert (choose(logits, sampling(2), random_tree(), torch.tensor([0, 0])) == 20).all()


def test_one_tokens_choice_does_not_depend_on_the_tree_around_it():
    """Sampling at a row of a tree equals sampling the same logits at the same position alone."""
    tree = random_tree(batch=1)
    logits = torch.randn(1, 13, VOCAB, generator=torch.Generator().manual_seed(2))
    among = choose(logits, sampling(1, temperature=0.9, top_p=0.9), tree, torch.tensor([33]))
    from ddtree.kernels.tree_tensors import root_only

    for row in range(13):
        position = 33 + tree.depths[0, row]
        alone = choose(
            logits[:, row : row + 1],
            sampling(1, temperature=0.9, top_p=0.9),
            root_only(torch.tensor([0])),
            position[None],
        )
        assert int(alone) == int(among[0, row])
