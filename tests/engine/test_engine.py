"""The engine's border: what it takes, refuses and says, on tiny random models."""

import json
import math
import time
from dataclasses import replace

import pytest
import torch

from ddtree import Engine, SamplingParams, Speculation
from ddtree.engine.runner import EagerRunner
from ddtree.errors import UserError
from filled_runner import FilledRunner
from tiny_models import make_drafter, make_target

TREE = Speculation("tree", 8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    target = make_target(folder / "target", "llama", eos_token_id=None)
    return target, make_drafter(folder / "drafter", target, block_size=6)


@pytest.fixture(scope="module")
def engine(folders):
    return Engine.load(*folders, dtype="float32", max_model_len=64, max_batch=3)


def ids(engine, prompts, params, speculation=None):
    return [c.token_ids for c in engine.generate(prompts, params, speculation=speculation)]


def test_more_prompts_than_slots_and_of_all_lengths(engine):
    prompts = [[5 + i] * (1 + 3 * i) for i in range(8)]
    params = SamplingParams(max_new_tokens=12)
    alone = [ids(engine, [p], params, Speculation("ar"))[0] for p in prompts]
    assert ids(engine, prompts, params, TREE) == alone
    assert engine._seating.is_idle
    assert engine._pool.free_pages == engine._pool.n_pages - 1


def test_each_prompt_its_own_params(engine):
    each = [SamplingParams(max_new_tokens=n, temperature=t, seed=n) for n, t in ((3, 0.0), (9, 0.7), (5, 1.5))]
    together = ids(engine, [[7, 8]] * 3, each, TREE)
    assert [len(t) for t in together] == [3, 9, 5]
    assert together == [ids(engine, [[7, 8]], p, TREE)[0] for p in each]


@pytest.mark.parametrize("mode", ["ar", "chain", "tree"])
def test_an_answer_ends_with_the_context(engine, mode):
    """The tree is cut at the context's end; the last token may stand at the last position, none beyond."""
    prompt = list(range(4, 50))
    done = engine.generate([prompt], SamplingParams(max_new_tokens=100), speculation=Speculation(mode))[0]
    assert len(prompt) + len(done.token_ids) == 64
    assert done.finish_reason == "length"
    assert done.token_ids == ids(engine, [prompt], SamplingParams(max_new_tokens=100), Speculation("ar"))[0]


@pytest.mark.parametrize("prefill_tokens", [1, 3, 16, 512])
def test_prefill_in_pieces_writes_the_same_drafter_context(folders, engine, prefill_tokens):
    """Trap 5: a stretch of prompt whose taps never reach the drafter costs acceptance, not text."""
    prompt = [4 + (7 * i) % 50 for i in range(33)]
    params = SamplingParams(max_new_tokens=20)
    whole = engine.generate([prompt], params, speculation=TREE)[0]
    pieces = Engine.load(*folders, dtype="float32", max_model_len=64, max_batch=3, prefill_tokens=prefill_tokens)
    for _ in range(2):  # the second time on pages that were used before
        again = pieces.generate([prompt], params, speculation=TREE)[0]
        assert again.token_ids == whole.token_ids
        assert again.stats.accepted_lengths == whole.stats.accepted_lengths


def test_drafter_context_left_unwritten_would_be_seen(folders, engine, monkeypatch):
    """Trap 5 put back: only the last chunk's taps are injected."""
    import ddtree.engine.prefill as prefill

    prompt = [4 + (7 * i) % 50 for i in range(33)]
    pieces = Engine.load(*folders, dtype="float32", max_model_len=64, prefill_tokens=11)
    drafts = []
    draft = type(pieces.drafter).draft
    monkeypatch.setattr(type(pieces.drafter), "draft", lambda *a: drafts.append(draft(*a)) or drafts[-1])
    pieces.generate([prompt], SamplingParams(max_new_tokens=2), speculation=TREE)
    inject = prefill.inject_taps
    monkeypatch.setattr(prefill, "inject_taps", lambda s, b, *a: inject(s, b, *a) if b.context_bound == 22 else None)
    pieces.state.drafter_cache.zero_()
    pieces.generate([prompt], SamplingParams(max_new_tokens=2), speculation=TREE)
    assert (drafts[0] - drafts[1]).abs().max() > 1e-2


def test_a_drafter_with_a_shorter_context_stops_drafting_and_says_so(folders, tmp_path):
    target, _ = folders
    short = make_drafter(tmp_path / "short", target, block_size=6, max_position_embeddings=20)
    engine = Engine.load(target, short, dtype="float32", max_model_len=64)
    done = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=40), speculation=TREE)[0]
    assert "drafter's context ends at 20" in done.stats.notes[0]
    assert done.token_ids == ids(engine, [[5, 6, 7]], SamplingParams(max_new_tokens=40), Speculation("ar"))[0]


def test_stream_gives_the_pieces_of_the_answer(engine):
    params = SamplingParams(max_new_tokens=15)
    whole = engine.generate([[5, 6]], params)[0]
    events = list(engine.stream([5, 6], params))
    assert "".join(e.text for e in events) == whole.text
    assert [t for e in events for t in e.token_ids] == whole.token_ids
    assert [e.completion for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].completion.token_ids == whole.token_ids


def test_a_stream_that_is_left_frees_its_place(engine):
    stream = engine.stream([5, 6], SamplingParams(max_new_tokens=30))
    next(stream)
    stream.close()
    assert engine._seating.is_idle
    assert engine._pool.free_pages == engine._pool.n_pages - 1


def test_recorded_trees_tell_the_answer(engine):
    done = engine.generate([[9, 4]], SamplingParams(max_new_tokens=14), speculation=TREE, record_trees=True)[0]
    told = [done.token_ids[0]]
    for traced in done.trees:
        assert traced.root_token == told[-1]
        assert len(traced.tree) == 8 or traced.tree.depth > 0
        told += [int(traced.tree.token_ids[n]) for n in traced.path] + [traced.bonus_token]
    assert told[: len(done.token_ids)] == done.token_ids


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (lambda e: e.generate([[]]), "the prompt is empty"),
        (lambda e: e.generate([[1, 61]]), "the prompt holds something that is no token"),
        (lambda e: e.generate([[1, True]]), "the prompt holds something that is no token"),
        (lambda e: e.generate([[5] * 64]), "the prompt has 64 tokens, the context 64"),
        (lambda e: e.generate("text"), "prompts is one string"),
        (lambda e: e.generate([[5]], [SamplingParams()] * 2), "2 sampling params for 1 prompts"),
        (lambda e: e.stream([5] * 70), "the prompt has 70 tokens"),
        (lambda e: e.check_lossless([5], []), "the answer is empty"),
        (lambda e: e.check_lossless([5] * 60, [5] * 5), "prompt and answer have 65 tokens"),
        (lambda e: e.generate([[5]], speculation=Speculation("chain", 9)), "a chain of 9 is longer than the block"),
    ],
)
def test_bad_requests_are_refused(engine, call, cause):
    with pytest.raises(UserError, match=cause):
        call(engine)
    assert engine._seating.is_idle


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0), ("max_new_tokens", 2.5), ("temperature", -1), ("temperature", float("nan")),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -1), ("min_p", 2), ("repetition_penalty", 0),
        ("repetition_penalty", 1e308), ("temperature", 1e-40),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("seed", -1), ("seed", 2**63), ("stop", "text"),
        ("stop", [""]), ("stop_token_ids", [-1]), ("stop_token_ids", ["x"]),
    ],
)  # fmt: skip
def test_sampling_params_out_of_range(name, value):
    with pytest.raises(UserError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"mode": "forest"}, "mode is 'forest'"),
        ({"budget": 0}, "budget is 0"),
        ({"budget": 1025}, "budget is 1025"),
        ({"budget": 2.0}, "budget is 2.0"),
        ({"mode": "ar", "budget": 4}, "means nothing in mode ar"),
        ({"mode": "chain", "top_k_cap": 4}, "means nothing in mode chain"),
    ],
)
def test_speculation_out_of_range(settings, cause):
    with pytest.raises(UserError, match=cause):
        Speculation(**settings)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"device": "tpu"}, "device 'tpu'"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"block_size": 1}, "block_size is 1"),
        ({"block_size": 65}, "block_size 65"),
        ({"draft_window": 0}, "draft_window is 0"),
        *(({"draft_temperature": value}, "draft_temperature is ") for value in (0, 0.09, 10.5, math.nan, True, "1")),
        ({"max_model_len": 257}, "max_model_len 257 is beyond"),
        ({"memory_fraction": 0}, "memory_fraction is 0"),
        ({"memory_fraction": 1e-9}, "GiB may be used"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"sliding_block": "both"}, "sliding_block is 'both'"),
    ],
)
def test_load_out_of_range(folders, settings, cause):
    with pytest.raises(UserError, match=cause):
        Engine.load(*folders, **settings)


def test_modes_that_draft_need_a_drafter(folders):
    with pytest.raises(UserError, match="mode tree needs a drafter"):
        Engine.load(folders[0], speculation=TREE)
    with pytest.raises(UserError, match="mean nothing without a drafter"):
        Engine.load(folders[0], draft_window=4)
    with pytest.raises(UserError, match="mean nothing without a drafter"):
        Engine.load(folders[0], draft_temperature=0.8)
    engine = Engine.load(folders[0], dtype="float32", max_model_len=32)
    assert engine.facts()["mode"] == "ar"
    with pytest.raises(UserError, match="mode chain needs a drafter"):
        engine.generate([[5]], speculation=Speculation("chain"))


def test_a_request_that_can_never_fit_the_cache(folders):
    engine = Engine.load(*folders, dtype="float32", max_model_len=64, max_batch=1)
    engine._pool.take(engine._pool.free_pages - 2)
    engine._pool.n_pages = 3
    with pytest.raises(UserError, match="needs a cache of"):
        engine.generate([[5]], SamplingParams(max_new_tokens=40))


def test_facts_echo_what_was_asked_for(folders):
    engine = Engine.load(
        *folders, dtype="float32", max_model_len=64, draft_window=9, draft_temperature=0.7,
        speculation=Speculation("tree", 5, 3),
    )  # fmt: skip
    facts = engine.facts()
    wanted = {"dtype": "float32", "mode": "tree", "budget": 5, "top_k_cap": 3, "block_size": 6, "draft_window": 9}
    wanted |= {"draft_temperature": 0.7}
    assert {key: facts[key] for key in wanted} == wanted
    assert len(facts["draft_config_sha256"]) == 64
    assert facts["torch"] == torch.__version__


@pytest.mark.parametrize("mode", ["ar", "tree"])
def test_times_of_rounds_are_those_of_the_wall_clock(engine, mode):
    began = time.perf_counter()
    stats = engine.generate([[5, 6]], SamplingParams(max_new_tokens=30), speculation=Speculation(mode))[0].stats
    elapsed_ms = 1e3 * (time.perf_counter() - began)
    told = stats.ttft_ms + sum(stats.round_ms)
    assert 0.7 * elapsed_ms < told < 1.01 * elapsed_ms
    assert stats.decode_tok_s == pytest.approx(29 / (sum(stats.round_ms) / 1e3))


def test_chunks_of_different_lengths_filled_up_to_one(folders, engine):
    """As graphs prefill: rows behind a chunk's end must leave no trace."""

    padded = Engine.load(*folders, dtype="float32", max_model_len=64, max_batch=3, prefill_tokens=20)
    padded._scheduler._runner = FilledRunner(padded.state, padded.target, padded.drafter)
    prompts = [[4 + (5 * i + j) % 50 for j in range(n)] for i, n in enumerate((3, 31, 20, 40, 1, 27))]
    for params in (SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=12, temperature=1.0, seed=4)):
        plain = engine.generate(prompts, params, speculation=TREE)
        filled = padded.generate(prompts, params, speculation=TREE)
        assert [c.token_ids for c in filled] == [c.token_ids for c in plain]
        assert [c.stats.accepted_lengths for c in filled] == [c.stats.accepted_lengths for c in plain]


def test_an_answer_ends_with_the_models_own_end_token(tmp_path):
    """From config.json and from generation_config.json; `ignore_eos` goes on."""
    free = Engine.load(make_target(tmp_path / "free", "llama", eos_token_id=None), dtype="float32", max_model_len=64)
    answer = free.generate([[5, 6, 7]], SamplingParams(max_new_tokens=20))[0].token_ids
    end = answer[9]
    first = answer.index(end)
    for place in ("config.json", "generation_config.json"):
        folder = make_target(tmp_path / place, "llama", eos_token_id=None)
        for name in ("config.json", "generation_config.json"):
            values = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
            values["eos_token_id"] = end if name == place else None
            (folder / name).write_text(json.dumps(values))
        engine = Engine.load(folder, dtype="float32", max_model_len=64)
        done = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=20))[0]
        assert done.token_ids == answer[: first + 1], place
        assert done.finish_reason == "stop"
        through = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=20, ignore_eos=True))[0]
        assert through.token_ids == answer


def test_recorded_trees_survive_the_next_round_of_an_overlapping_runner(folders):
    """As graphs run: one set of tensors for all rounds, and tokens that are read behind the next launch."""

    class Overlapping(EagerRunner):
        overlaps, kept = True, None

        def launch(self, *arguments, is_timed):
            fresh = super().launch(*arguments)
            if self.kept is None:
                self.kept = fresh.copied()
            for own, new in ((self.kept.tree, fresh.tree), (self.kept.path, fresh.path)):
                for name, tensor in vars(new).items():
                    getattr(own, name).copy_(tensor)
            return replace(fresh, tree=self.kept.tree, path=self.kept.path)

    engine = Engine.load(*folders, dtype="float32", max_model_len=64, max_batch=1, speculation=TREE)
    engine._runner = engine._scheduler._runner = Overlapping(engine.state, engine.target, engine.drafter)
    done = engine.generate([[9, 4]], SamplingParams(max_new_tokens=14), record_trees=True)[0]
    told = [done.token_ids[0]]
    for traced in done.trees:
        assert traced.root_token == told[-1]
        told += [int(traced.tree.token_ids[n]) for n in traced.path] + [traced.bonus_token]
    assert told[: len(done.token_ids)] == done.token_ids
