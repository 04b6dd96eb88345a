"""Rounds against a plain implementation: the same tokens, the same number in every round, and the same trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddtree import Engine, SamplingParams, Speculation
from ddtree.demo import drafter_folder, target_folder
from devices import GPU
from pairs import VOCAB, Pair, assert_same, assert_same_tree, chat_tokens, greedy, make_pair, real_pair
from plain_round import PlainAnswer, PlainEngine, best_prefixes
from tiny_models import make_drafter, make_target

N_NEW = 30
PROMPTS = [[4, 5, 6, 7, 8, 9, 5, 4], [11, 3], [6], [7, 9, 4, 4, 10, 8, 1, 5, 5, 6, 7, 10, 9, 8, 4, 0, 11]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


def compare(
    engine: Engine, plain: PlainEngine, budget: int, top_k: int | None = None, prompt: list[int] = PROMPTS[0]
) -> PlainAnswer:
    """One greedy answer both ways."""
    speculation = Speculation("tree", budget=budget, top_k_cap=top_k)
    (ours,) = engine.generate([prompt], greedy(N_NEW), speculation=speculation, record_trees=True)
    wanted = plain.answer(prompt, N_NEW, budget=budget, top_k=top_k or min(budget, 64))
    assert_same(ours, wanted)
    return wanted


@pytest.mark.parametrize(("family", "seed"), [("llama", 0), ("llama", 3), ("qwen2", 1), ("qwen3", 5)])
def test_budgets(family: str, seed: int, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, family, seed)
    engine, plain = pair.engine(), pair.plain()
    rounds = [len(compare(engine, plain, budget).accepted_lengths) for budget in (1, 4, 7, 32, 64)]
    assert rounds[0] > rounds[-1], "no draft was ever accepted: the comparison says little"


@pytest.mark.parametrize("top_k", [1, 2, 3, 11, 12, 40])
def test_top_k_caps(pair: Pair, top_k: int) -> None:
    compare(pair.engine(), pair.plain(), 16, top_k)


@pytest.mark.parametrize("budget", [None, 1, 3])
def test_chains(pair: Pair, budget: int | None) -> None:
    (ours,) = pair.engine().generate(
        [PROMPTS[0]], greedy(N_NEW), speculation=Speculation("chain", budget), record_trees=True
    )
    assert_same(ours, pair.plain().answer(PROMPTS[0], N_NEW, budget=budget or 7, top_k=1))


def test_several_prompts_at_once(pair: Pair) -> None:
    """Ragged lengths in one batch, more prompts than slots, and requests that draft in other shapes."""
    engine, plain = pair.engine(max_batch=3), pair.plain()
    for budget in (4, 32):
        ours = engine.generate(PROMPTS, greedy(N_NEW), speculation=Speculation("tree", budget), record_trees=True)
        for completion, prompt in zip(ours, PROMPTS, strict=True):
            assert_same(completion, plain.answer(prompt, N_NEW, budget=budget, top_k=budget))


@pytest.mark.parametrize("max_model_len", [10, 11, 16, 17, 18, 23])
def test_near_the_end_of_the_context(pair: Pair, max_model_len: int) -> None:
    """The tree shrinks so that its path and the bonus token still fit."""
    engine, plain = pair.engine(max_model_len), pair.plain(max_model_len)
    for budget in (4, 32):
        wanted = compare(engine, plain, budget)
        assert len(PROMPTS[0]) + len(wanted.tokens) == max_model_len and wanted.finish_reason == "length"


def test_past_the_end_of_the_drafters_context(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, max_position_embeddings=24)
    engine, plain = pair.engine(), pair.plain()
    wanted = compare(engine, plain, 32)
    assert wanted.accepted_lengths[-5:] == [1] * 5 and max(wanted.accepted_lengths) > 1
    (ours,) = engine.generate([PROMPTS[0]], greedy(N_NEW))
    assert "the drafter's context ends at 24" in ours.stats.notes[0]


@pytest.mark.parametrize("window", [1, 6, 20])
def test_draft_windows(pair: Pair, window: int) -> None:
    compare(pair.engine(draft_window=window), pair.plain(draft_window=window), 32)


@pytest.mark.parametrize("temperature", [0.3, 2.5])
def test_draft_temperatures(pair: Pair, tmp_path: Path, temperature: float) -> None:
    """The drafter's own, and one given at the start; trees differ from those at 1."""
    dflash = {"mask_token_id": 3, "target_layer_ids": [0, 2], "draft_temperature": temperature}
    own = make_pair(tmp_path, dflash_config=dflash)
    assert own.engine().facts()["draft_temperature"] == temperature
    compare(own.engine(), own.plain(), 16)
    given = compare(pair.engine(draft_temperature=temperature), pair.plain(draft_temperature=temperature), 16)
    back = compare(own.engine(draft_temperature=1), own.plain(draft_temperature=1.0), 16)
    assert given.tokens == back.tokens and given.trees[0].scores.keys() != back.trees[0].scores.keys()


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        ({"temperature": 0.0}, 0.4),
        ({"temperature": 0.5}, 0.7),
        ({"temperature": 1.0}, 1.0),
        ({"temperature": 1.5}, 1.0),
        ({"temperature": 1.0, "top_k": 1}, 0.4),  # there is nothing to choose from
    ],
)
def test_requests_that_sample_get_trees_at_their_own_temperature(
    pair: Pair, sampling: dict[str, Any], wanted: float
) -> None:
    """Together with a greedy one in a batch; between 0 and 1 the temperature changes in proportion."""
    params = [SamplingParams(max_new_tokens=20, seed=3, ignore_eos=True, **own) for own in (sampling, {})]
    speculation = Speculation("tree", 16)
    completions = pair.engine(draft_temperature=0.4).generate(
        PROMPTS[:2], params, speculation=speculation, record_trees=True
    )
    plain = pair.plain()
    for completion, prompt, temperature in zip(completions, PROMPTS, (wanted, 0.4), strict=False):
        text, rounds = [*prompt, completion.token_ids[0]], iter(completion.token_ids[1:])
        for length, tree in zip(completion.stats.accepted_lengths, completion.trees, strict=True):
            assert_same_tree(tree, plain.draft(text[:-1], text[-1], 16, 16, temperature))
            text += [next(rounds) for _ in range(length)]


@pytest.mark.skipif(not GPU, reason="rounds are captured on a GPU only")
def test_a_captured_round_builds_trees_at_the_temperature_of_who_sits_there() -> None:
    """One seat, taken in turn by requests that sample otherwise: each gets the trees that it gets without graphs."""
    trees = []
    for graphs in ("on", "off"):
        engine = Engine.load(
            target_folder(), drafter_folder(), device="cuda", dtype="float32", max_model_len=256, max_batch=1,
            graphs=graphs, draft_temperature=0.3,
        )  # fmt: skip
        trees.append([])
        for temperature in (0.0, 1.0, 0.0, 0.6):
            (done,) = engine.generate(
                ["Once upon a time"],
                SamplingParams(max_new_tokens=24, temperature=temperature, seed=5),
                speculation=Speculation("tree", 15),
                record_trees=True,
            )
            trees[-1].append([each.tree.log_scores.round(2).tolist() for each in done.trees])
    assert trees[0] == trees[1] and trees[0][0][0] != trees[0][1][0]


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 9}


@pytest.mark.parametrize("sliding_block", ["bidirectional", "causal"])
def test_sliding_window_drafters(tmp_path: Path, sliding_block: str) -> None:
    pair = make_pair(tmp_path, **SLIDING)
    compare(pair.engine(sliding_block=sliding_block), pair.plain(sliding_is_causal=sliding_block == "causal"), 32)


@pytest.mark.parametrize("settings", [{"is_causal": True}, {"attention_bias": True}, {"n_layers": 1}], ids=str)
def test_other_drafters(tmp_path: Path, settings: dict[str, Any]) -> None:
    pair = make_pair(tmp_path, **settings)
    compare(pair.engine(), pair.plain(), 32)


@pytest.mark.parametrize("block_size", [2, 3, 16])
def test_block_sizes(pair: Pair, block_size: int) -> None:
    compare(pair.engine(block_size=block_size), pair.plain(block_size=block_size), 32)


@pytest.mark.parametrize("prefill_tokens", [1, 5, 16])
def test_prompts_prefilled_in_chunks(pair: Pair, prefill_tokens: int) -> None:
    """The drafter's context comes chunk by chunk too."""
    compare(pair.engine(prefill_tokens=prefill_tokens), pair.plain(), 32, prompt=PROMPTS[3])


def test_stop_tokens_inside_an_accepted_run(pair: Pair) -> None:
    """Whatever token stops the answer, wherever in a round it stands."""
    engine, plain = pair.engine(), pair.plain()
    for stop in range(VOCAB):
        wanted = plain.answer(PROMPTS[0], N_NEW, budget=32, top_k=32, stop_token_ids=(stop,))
        (ours,) = engine.generate(
            [PROMPTS[0]], greedy(N_NEW, stop_token_ids=[stop]), speculation=Speculation("tree", 32)
        )
        assert_same(ours, wanted)


@pytest.mark.parametrize("n_new", [1, 2, 3, 5, 6])
def test_token_limits_inside_an_accepted_run(pair: Pair, n_new: int) -> None:
    (ours,) = pair.engine().generate([PROMPTS[0]], greedy(n_new), speculation=Speculation("tree", 32))
    assert_same(ours, pair.plain().answer(PROMPTS[0], n_new, budget=32, top_k=32))


def test_targets_with_sliding_windows_and_scaled_rope(tmp_path: Path) -> None:
    target = make_target(
        tmp_path / "target",
        "qwen3",
        seed=7,
        vocab_size=VOCAB,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention"] * 2,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 500.0,
        },
    )
    pair = Pair(target, make_drafter(tmp_path / "drafter", target, taps=[0, 2]))
    compare(pair.engine(), pair.plain(), 32)


def test_the_real_pair() -> None:
    pair = real_pair()
    prompt = chat_tokens(pair, "Write a Python function that counts the vowels in a word.")
    engine, plain = pair.engine(max_batch=1), pair.plain()
    for budget in (8, 32):
        speculation = Speculation("tree", budget)
        (ours,) = engine.generate([prompt], greedy(40), speculation=speculation, record_trees=True)
        wanted = plain.answer(prompt, 40, budget=budget, top_k=budget)
        assert_same(ours, wanted)
        assert len(wanted.accepted_lengths) < 20, "the trained drafter should be right more often"


def test_the_plain_choice_of_prefixes_is_the_choice_from_all() -> None:
    """The oracle leaves out prefixes that can not be chosen; here nothing is left out."""
    random = np.random.default_rng(1)
    for budget in (1, 5, 17, 60):
        log_probs = np.log(random.dirichlet(np.ones(4), size=4)).astype(np.float32)
        log_probs = np.round(log_probs)  # many ties
        everything = best_prefixes(log_probs, 10**9, 4)
        assert len(everything) == 4 + 16 + 64 + 256
        assert list(best_prefixes(log_probs, budget, 4)) == list(everything)[:budget]
