"""T > 0 on a tiny vocabulary: the joint law of three tokens, from the target's own probabilities by enumeration."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from ddtree import Engine, SamplingParams, Speculation
from tiny_models import make_drafter, make_target

VOCAB, PROMPT, SAMPLES = 7, [4, 5, 4], 20_000


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    target = make_target(folder / "target", "qwen3", vocab_size=VOCAB, num_hidden_layers=3, eos_token_id=None)
    drafter = make_drafter(folder / "drafter", target, block_size=4)
    weights = load_file(drafter / "model.safetensors")
    # An undecided drafter, whose trees are broad: the target's samples then take many different branches.
    save_file({**weights, "norm.weight": weights["norm.weight"] * 0.3}, drafter / "model.safetensors")
    engine = Engine.load(target, drafter, dtype="float32", max_model_len=16, max_batch=500)
    return engine, AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


def next_token_probs(model, generated, params):
    """The target's distribution after a prefix, filtered by transformers' processors, in float64."""
    ids = torch.tensor([PROMPT + generated])
    with torch.no_grad():
        scores = model(ids).logits[:, -1]
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token in set(generated):
        scores[0, token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    scores = TopPLogitsWarper(params.top_p)(ids, scores / params.temperature)
    return scores[0].double().softmax(0).numpy()


def joint_law(model, params):
    law = np.zeros((VOCAB,) * 3)
    first = next_token_probs(model, [], params)
    for a in range(VOCAB):
        second = next_token_probs(model, [a], params)
        for b in range(VOCAB):
            law[a, b] = first[a] * second[b] * next_token_probs(model, [a, b], params)
    return law


def observed(engine, params, speculation):
    each = [SamplingParams(**{**params.__dict__, "seed": seed}) for seed in range(SAMPLES)]
    counts = np.zeros((VOCAB,) * 3)
    accepted = rounds = 0
    for begin in range(0, SAMPLES, 500):
        for done in engine.generate([PROMPT] * 500, each[begin : begin + 500], speculation=speculation):
            counts[tuple(done.token_ids)] += 1
            accepted, rounds = accepted + sum(done.stats.accepted_lengths), rounds + done.stats.rounds
    return counts, accepted / rounds


def p_value(counts, law):
    """Chi-square over the cells that expect at least 5, the others put together."""
    expected = law * counts.sum()
    common = expected >= 5
    assert counts[law == 0].sum() == 0, "a filtered token was drawn"
    rest = (counts[~common].sum(), expected[~common].sum())
    seen = np.append(counts[common], rest[0]) if rest[1] else counts[common]
    wanted = np.append(expected[common], rest[1]) if rest[1] else expected[common]
    return stats.chisquare(seen, wanted * (seen.sum() / wanted.sum())).pvalue


PLAIN = SamplingParams(max_new_tokens=3, temperature=0.9, ignore_eos=True)
SHAPED = SamplingParams(
    max_new_tokens=3, temperature=1.2, top_p=0.85, repetition_penalty=1.3, presence_penalty=0.3,
    frequency_penalty=0.4, ignore_eos=True,
)  # fmt: skip


@pytest.mark.parametrize("speculation", [Speculation("tree", 6), Speculation("chain")], ids=["tree", "chain"])
def test_joint_law_of_three_tokens(pair, speculation):
    """With temperature, top-p and all penalties on."""
    engine, model = pair
    law = joint_law(model, SHAPED)
    assert law.sum() == pytest.approx(1)
    counts, tau = observed(engine, SHAPED, speculation)
    assert tau > 1.05, "drafts must be accepted now and then, or nothing is tested"
    assert p_value(counts, law) > 1e-3


def test_the_biased_rule_would_be_seen(pair):
    """The fault of hipfire PR 483: keep a drafted candidate with min(1, p / q) over the tree's own candidates.

    With the candidates of a top-k tree, q is renormalised over them, and the rule favours them. Played on paper for the
    first token: the test above would reject it.
    """
    _, model = pair
    p = next_token_probs(model, [], PLAIN)
    law = joint_law(model, PLAIN)
    kept = np.argsort(-p)[:2]
    q = np.zeros(VOCAB)
    q[kept] = 0.5
    biased = np.zeros(VOCAB)
    for token in kept:
        biased[token] += q[token] * min(1, p[token] / q[token])
    biased += (1 - biased.sum()) * p
    rng = np.random.default_rng(0)
    counts = np.zeros((VOCAB,) * 3)
    conditional = law / law.sum(axis=(1, 2), keepdims=True)
    for first, n in enumerate(rng.multinomial(SAMPLES, biased / biased.sum())):
        counts[first] = rng.multinomial(n, conditional[first].ravel()).reshape(VOCAB, VOCAB)
    assert p_value(counts, law) < 1e-6
