"""Bias and log-probabilities: taken on the device at each row of a tree, and the same as in plain decoding."""

import pytest
import torch

from ddtree import Engine, SamplingParams, Speculation
from ddtree.errors import UserError
from tiny_models import make_drafter, make_target, reference_model

AR = Speculation("ar")
DRAFTS = [Speculation("chain"), Speculation("tree", 16), Speculation("tree", "auto")]
PROMPT = [9, 14, 7, 30]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    target = make_target(folder / "target", "llama", eos_token_id=None, vocab_size=40)
    return target, make_drafter(folder / "drafter", target, block_size=6)


@pytest.fixture(scope="module")
def engine(folders):
    return Engine.load(*folders, dtype="float32", device="cpu", max_model_len=96, max_batch=3, prefill_tokens=3)


@pytest.fixture(scope="module")
def reference(folders):
    model = reference_model(folders[0])

    def log_probs(prompt, output):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)

    return log_probs


def answer(engine, params, speculation=AR, prompt=PROMPT):
    return engine.generate([prompt], params, speculation=speculation)[0]


@pytest.mark.parametrize("speculation", [AR, *DRAFTS], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_logprobs_are_the_references(engine, reference, speculation, temperature):
    params = SamplingParams(
        max_new_tokens=25, logprobs=4, temperature=temperature, seed=3, top_p=0.9, presence_penalty=0.5,
        logit_bias={5: 2.0},
    )  # fmt: skip
    done = answer(engine, params, speculation)
    expected = reference(PROMPT, done.token_ids)
    assert [told.token_id for told in done.logprobs] == done.token_ids
    own = expected.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([t.logprob for t in done.logprobs]), own, atol=1e-4, rtol=0)
    top = expected.topk(4)
    assert [[token for token, _ in told.top] for told in done.logprobs] == top.indices.tolist()
    values = torch.tensor([[value for _, value in told.top] for told in done.logprobs])
    torch.testing.assert_close(values, top.values, atol=1e-4, rtol=0)


def test_asking_for_logprobs_changes_no_token(engine):
    for speculation in DRAFTS:
        params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=8)
        told = SamplingParams(max_new_tokens=20, temperature=1.0, seed=8, logprobs=0)
        plain, asked = answer(engine, params, speculation), answer(engine, told, speculation)
        assert plain.token_ids == asked.token_ids
        assert plain.logprobs == [] and all(t.top == () for t in asked.logprobs)


def test_logprobs_end_where_the_answer_ends(engine):
    free = answer(engine, SamplingParams(max_new_tokens=30))
    stop = free.token_ids[11]
    for speculation in DRAFTS:
        done = answer(engine, SamplingParams(max_new_tokens=30, stop_token_ids=[stop], logprobs=2), speculation)
        assert [t.token_id for t in done.logprobs] == done.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_each_of_a_batch_gets_its_own(engine, reference):
    each = [
        SamplingParams(max_new_tokens=12, logprobs=2),
        SamplingParams(max_new_tokens=15, temperature=0.9, seed=1),
        SamplingParams(max_new_tokens=9, logprobs=20, logit_bias={7: -100, 8: 3}),
    ]
    prompts = [[4, 5], [6] * 9, [7, 8, 9]]
    together = engine.generate(prompts, each, speculation=Speculation("tree", 8))
    for prompt, params, done in zip(prompts, each, together, strict=True):
        assert done.token_ids == answer(engine, params, prompt=prompt).token_ids
        assert len(done.logprobs) == (len(done.token_ids) if params.logprobs is not None else 0)
        if done.logprobs:
            assert {len(t.top) for t in done.logprobs} == {params.logprobs}
            own = reference(prompt, done.token_ids).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor([t.logprob for t in done.logprobs]), own, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_is_the_same_in_every_mode(engine, temperature):
    free = answer(engine, SamplingParams(max_new_tokens=25, temperature=temperature, seed=2))
    banned = max(set(free.token_ids), key=free.token_ids.count)
    params = SamplingParams(max_new_tokens=25, temperature=temperature, seed=2, logit_bias={banned: -100, 11: 1.5})
    plain = answer(engine, params)
    assert banned not in plain.token_ids and plain.token_ids != free.token_ids
    for speculation in DRAFTS:
        assert answer(engine, params, speculation).token_ids == plain.token_ids
    assert (
        answer(engine, SamplingParams(max_new_tokens=25, temperature=temperature, seed=2)).token_ids == free.token_ids
    )


def test_a_bias_that_outweighs_all(engine):
    assert answer(engine, SamplingParams(max_new_tokens=6, logit_bias={33: 100}), DRAFTS[1]).token_ids == [33] * 6


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"logit_bias": {-1: 1}}, "logit_bias is"),
        ({"logit_bias": {1: 101}}, "logit_bias is"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias is"),
        ({"logit_bias": {"1": 1}}, "logit_bias is"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": True}, "logprobs is True"),
        ({"logit_bias": {40: 1}}, "logit_bias names token 40"),
    ],
    ids=str,
)
def test_out_of_range(engine, settings, cause):
    with pytest.raises(UserError, match=cause):
        answer(engine, SamplingParams(**settings))
