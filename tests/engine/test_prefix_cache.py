"""The prefix cache: what is found is what would have been computed, for target and drafter; no page is lost."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree import Completion, Engine, SamplingParams, Speculation
from ddtree.engine.pages import PagePool
from ddtree.engine.prefix_cache import PrefixCache
from pairs import Pair, chat_tokens, greedy, make_pair, real_pair

PAGE = 16
MODES = [Speculation("ar"), Speculation("chain"), Speculation("tree", 9)]
LONG = [4 + (i * 7 + i * i) % 8 for i in range(80)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def cold(pair: Pair) -> Engine:
    return pair.engine(max_model_len=200, max_batch=3)


@pytest.fixture
def warm(pair: Pair) -> Engine:
    return pair.engine(max_model_len=200, max_batch=3, prefix_cache=True, prefill_tokens=24)


def same(ours: Completion, wanted: Completion) -> bool:
    return (ours.token_ids, ours.stats.accepted_lengths) == (wanted.token_ids, wanted.stats.accepted_lengths)


def is_whole(engine: Engine) -> bool:
    """No page is promised to anybody, and none is lost or owned twice."""
    pages = [*engine._pool._free, *engine._prefixes._by_page]
    return engine.occupancy().cache_tokens_used == 0 and sorted(pages) == list(range(1, engine._pool.n_pages))


@pytest.mark.parametrize("speculation", MODES, ids=lambda s: s.mode)
@pytest.mark.parametrize("sampled", [False, True])
def test_warm_answers_and_acceptance_are_the_cold_ones(
    cold: Engine, warm: Engine, speculation: Speculation, sampled: bool
) -> None:
    params = SamplingParams(
        max_new_tokens=30, ignore_eos=True, temperature=float(sampled), seed=3, logprobs=2,
        repetition_penalty=1.3 if sampled else 1.0,
    )  # fmt: skip
    prompts = [LONG, LONG, LONG[:50], [*LONG[:49], 11, 10], LONG[:16], LONG[:17], [5, *LONG], LONG + [7] * 9]
    hits = [0, 64, 48, 48, 0, 16, 0, 80]  # full pages before the last token, as far as they are known
    for prompt, hit in zip(prompts, hits, strict=True):
        (ours,) = warm.generate([prompt], params, speculation=speculation)
        (wanted,) = cold.generate([prompt], params, speculation=speculation)
        assert same(ours, wanted)
        assert ours.stats.cached_tokens == hit and wanted.stats.cached_tokens == 0
        assert [t.token_id for t in ours.logprobs] == [t.token_id for t in wanted.logprobs]
        told = [torch.tensor([t.logprob for t in each.logprobs]) for each in (ours, wanted)]
        torch.testing.assert_close(*told, atol=1e-4, rtol=0)
    assert is_whole(warm)
    facts = warm.facts()["prefix_cache"]
    assert facts["hit_tokens"] == sum(hits) and facts["prompt_tokens"] == sum(map(len, prompts))


def test_a_conversation_goes_on_where_its_answers_ended(cold: Engine, warm: Engine) -> None:
    """Answers too are found again, with the drafter's context of them."""
    talk = LONG[:20]
    for turn in range(4):
        (ours,) = warm.generate([talk], greedy(33), speculation=MODES[2])
        (wanted,) = cold.generate([talk], greedy(33), speculation=MODES[2])
        assert same(ours, wanted)
        # The drafter's context of the last round is written a round later, which never came.
        assert ours.stats.cached_tokens >= (len(talk) - 3 - 8 - PAGE if turn else 0)
        talk = [*talk, *ours.token_ids, 5, 6]


def test_every_page_that_is_found_holds_what_a_prefill_would_write(cold: Engine, warm: Engine) -> None:
    """Keys and values of target and drafter, wherever the last round happens to end within a page."""

    def run(engine: Engine, prompt: list[int], n_new: int) -> list[int]:
        sequence = engine.submit(prompt, greedy(n_new), speculation=MODES[2])
        while sequence.finish_reason is None:
            engine.step()
        return [*prompt, *sequence.output]

    def held(engine: Engine, pages: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        slots = [page * PAGE + place for page in pages for place in range(PAGE)]
        assert engine.state.drafter_cache is not None
        return engine.state.target_cache[:, :, slots], engine.state.drafter_cache[:, :, slots]

    found = 0
    for n_new in range(14, 34):
        warm._prefixes.clear()
        text = run(warm, LONG[:15], n_new)
        pages = [kept.page for kept in warm._prefixes.find(warm._prefixes.keys(text), drafts=True)]
        run(cold, text, 1)
        first_pages = list(range(1, len(pages) + 1))  # of an idle pool, in order
        for ours, wanted in zip(held(warm, pages), held(cold, first_pages), strict=True):
            torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-3)
        found += len(pages)
    assert found > 20


def test_running_sequences_share_their_prompts(cold: Engine, warm: Engine) -> None:
    first = warm.submit(LONG, greedy(60), speculation=MODES[2])
    while not first.is_prefilled:
        warm.step()
    used = warm.occupancy().cache_tokens_used
    second = warm.submit(LONG[:70], greedy(9), speculation=MODES[2])
    warm.step()
    assert second.stats.cached_tokens == 64 and first.finish_reason is None
    room = warm._seating._pages_of(second) * PAGE
    assert warm.occupancy().cache_tokens_used == used + room - 64, "what is shared is not promised twice"
    while first.finish_reason is None or second.finish_reason is None:
        warm.step()
    for done, prompt, n in ((first, LONG, 60), (second, LONG[:70], 9)):
        assert same(done.completion(), cold.generate([prompt], greedy(n), speculation=MODES[2])[0])
    assert is_whole(warm)


def answers(engine: Engine, prompt: list[int]) -> list[Completion]:
    """The same prompt without drafts, then with them."""
    return [engine.generate([prompt], greedy(40), speculation=s)[0] for s in (MODES[0], MODES[2], MODES[2])]


def put_back_an_unwritten_context(patch: pytest.MonkeyPatch) -> None:
    publish = PrefixCache.publish

    def boast(self: PrefixCache, keys: Any, pages: Any, drafted_pages: int) -> None:
        publish(self, keys, pages, len(pages))

    patch.setattr(PrefixCache, "publish", boast)


def test_trap_5_the_drafter_has_the_context_of_what_is_found(
    cold: Engine, warm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = answers(cold, LONG)
    ours = answers(warm, LONG)
    assert all(map(same, ours, wanted))
    assert [done.stats.cached_tokens for done in ours] == [0, 0, 64], "what was not drafted is computed once more"
    assert warm.generate([LONG], greedy(9), speculation=MODES[0])[0].stats.cached_tokens == 64
    warm._prefixes.clear()
    put_back_an_unwritten_context(monkeypatch)
    assert not all(map(same, answers(warm, LONG), wanted))


def test_trap_5_with_the_real_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    smollm2 = real_pair()
    prompt = chat_tokens(
        smollm2, "A train goes 60 miles in 2 hours. How far does it go in 5 hours? Think step by step."
    )
    warm = smollm2.engine(max_model_len=160, prefix_cache=True)
    (wanted,) = warm.generate([prompt], greedy(48), speculation=Speculation("tree", 16))
    assert wanted.stats.cached_tokens == 0
    warm._prefixes.clear()

    def rounds() -> list[int]:
        modes = (Speculation("ar"), Speculation("tree", 16), Speculation("tree", 16))
        done = [warm.generate([prompt], greedy(48), speculation=mode)[0] for mode in modes]
        assert all(each.token_ids == wanted.token_ids for each in done)
        assert done[2].stats.cached_tokens == (len(prompt) - 1) // PAGE * PAGE
        return done[2].stats.accepted_lengths

    assert rounds() == wanted.stats.accepted_lengths
    warm._prefixes.clear()
    put_back_an_unwritten_context(monkeypatch)
    assert len(rounds()) > 1.2 * wanted.stats.rounds


def test_what_comes_after_a_stop_is_in_no_key(cold: Engine, warm: Engine) -> None:
    """A stop in the middle of an accepted run: the tokens behind it are committed, and yet nobody's text."""
    free = cold.generate([LONG[:40]], greedy(40), speculation=MODES[2])[0]
    cut = 0
    for stop in sorted(set(free.token_ids)):
        params = SamplingParams(max_new_tokens=40, stop_token_ids=[stop], ignore_eos=True)
        sequence = warm.submit(LONG[:40], params, speculation=MODES[2])
        while sequence.finish_reason is None:
            warm.step()
        text = [*sequence.prompt, *sequence.output]
        cut += sequence.committed > len(text)
        known = {key for n in range(len(text)) for key in warm._prefixes.keys(text[:n])}
        known |= set(warm._prefixes.keys([*LONG[:40], *free.token_ids]))
        assert set(warm._prefixes._by_key) <= known
        (ours,) = warm.generate([[*text, 6]], greedy(20), speculation=MODES[2])
        assert same(ours, cold.generate([[*text, 6]], greedy(20), speculation=MODES[2])[0])
        warm._prefixes.clear()
    assert cut, "no stop fell into an accepted run: the test saw nothing"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_64_requests_through_a_small_pool_all_finish_as_alone(pair: Pair, cold: Engine, prefix_cache: bool) -> None:
    """Requests wait for pages; what runs has all it can ever need, so nothing is evicted or preempted."""
    engine = pair.engine(max_model_len=200, max_batch=8, prefix_cache=prefix_cache)
    engine._pool.take(engine._pool.free_pages - 16)  # room for three of these at a time
    dice = random.Random(1)
    prompts = [LONG[: dice.choice((20, 33, 48))] + [4 + i % 7] * (1 + i % 5) for i in range(64)]
    sequences = [engine.submit(p, greedy(3 + i % 20), speculation=MODES[i % 3]) for i, p in enumerate(prompts)]
    running = set()
    while any(s.finish_reason is None for s in sequences):
        engine.step()
        running.add(engine.occupancy().running)
        assert engine.occupancy().cache_tokens_used <= engine.occupancy().cache_tokens
    assert max(running) < 8, "the pool was not small"
    for i, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
        assert same(sequence.completion(), cold.generate([prompt], greedy(3 + i % 20), speculation=MODES[i % 3])[0]), i
    assert engine._prefixes.free_pages == 16
    facts = engine._prefixes.facts()
    assert (facts.hit_tokens > 0) == (facts.evicted_tokens > 0) == prefix_cache


def test_admission_is_never_harder_than_without(pair: Pair) -> None:
    """A prompt that is kept may run although every page is kept by something."""
    engine = pair.engine(max_model_len=100, max_batch=1, prefix_cache=True)
    for start in range(4, 12):
        engine.generate([[start, *LONG[:60]]], greedy(20), speculation=MODES[2])
    sequence = engine.submit([4, *LONG[:60]], SamplingParams(max_new_tokens=39, ignore_eos=True), speculation=MODES[2])
    while sequence.finish_reason is None:
        engine.step()
        assert engine.occupancy().running or sequence.finish_reason
    assert is_whole(engine)


def test_after_a_fault_nothing_is_found(warm: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    warm.generate([LONG], greedy(9), speculation=MODES[2])
    sequence = warm.submit([5, *LONG], greedy(50), speculation=MODES[2])
    warm.step()
    with monkeypatch.context() as patch:
        patch.setattr(warm._scheduler, "_land", lambda work: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            warm.step()
    warm.cancel(sequence)
    assert warm.occupancy().prefix_tokens == 0 and is_whole(warm)
    assert warm.generate([LONG], greedy(9), speculation=MODES[2])[0].stats.cached_tokens == 0


def test_lossless_is_checked_while_pages_are_kept(warm: Engine) -> None:
    for start in range(4, 12):
        (done,) = warm.generate([[start, *LONG]], greedy(60), speculation=MODES[2])
    assert warm.check_lossless([11, *LONG], done.token_ids).faults == 0
    assert is_whole(warm)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 40},
        {
            "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
            "original_max_position_embeddings": 40,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_angles_that_depend_on_the_prompts_length(tmp_path: Path, rope: dict[str, Any]) -> None:
    """A prefix is found only by prompts that turn it by the same angles."""
    from tiny_models import make_drafter, make_target

    target = make_target(
        tmp_path / "target", "llama", vocab_size=12, num_hidden_layers=4, rope_parameters={"rope_theta": 1e4, **rope}
    )
    pair = Pair(target, make_drafter(tmp_path / "drafter", target, taps=[0, 2]))
    cold, warm = pair.engine(max_model_len=200), pair.engine(max_model_len=200, prefix_cache=True)
    hits = []
    for length in (36, 39, 60, 60, 75):
        (ours,) = warm.generate([LONG[:length]], greedy(20), speculation=MODES[2])
        assert same(ours, cold.generate([LONG[:length]], greedy(20), speculation=MODES[2])[0])
        hits.append(ours.stats.cached_tokens)
    assert hits == [0, 32, 0, 48, 0]


def test_pages_and_what_they_hold_at_random() -> None:
    """A model of memory beside the cache: what is found holds what its key says, and no page is written while read."""
    dice = random.Random(7)
    pool = PagePool(40, PAGE)
    cache = PrefixCache(pool, is_on=True)
    written: dict[int, tuple[tuple[int, ...], bool]] = {}
    running: list[tuple[list[int], list[int], int, bool]] = []  # tokens, pages, found, drafts
    texts = [[dice.randrange(3) for _ in range(PAGE * dice.randrange(1, 9))] for _ in range(3)]
    admitted = hits = 0
    for _ in range(4000):
        if running and dice.random() < 0.5:
            tokens, pages, _, drafts = running.pop(dice.randrange(len(running)))
            full = len(tokens) // PAGE
            if dice.random() < 0.8:
                cache.publish(cache.keys(tokens), pages, dice.randrange(full + 1) if drafts and dice.random() < 0.3
                              else full * drafts)  # fmt: skip
            cache.release(pages)
        else:
            tokens = dice.choice(texts)[: dice.randrange(1, 140)] + [
                dice.randrange(3) for _ in range(dice.randrange(40))
            ]
            drafts = dice.random() < 0.6
            kept = cache.find(cache.keys(tokens[:-1]), drafts)
            own = pool.pages_for(len(tokens)) + 1 - len(kept)
            if not cache.fits(kept, own):
                continue
            for place, each in enumerate(kept):
                assert written[each.page][0] == tuple(tokens[: (place + 1) * PAGE])
                assert written[each.page][1] or not drafts
            before = cache.free_pages
            pages = cache.take(kept, own)
            assert len(set(pages)) == len(pages) and cache.free_pages <= before
            in_use = {page for _, others, *_ in running for page in others}
            assert not in_use & set(pages[len(kept) :])
            for place, page in enumerate(pages[len(kept) :], start=len(kept)):
                written[page] = (tuple(tokens[: (place + 1) * PAGE]), drafts)
            running.append((tokens, pages, len(kept), drafts))
            admitted, hits = admitted + 1, hits + len(kept)
        held = {page for _, pages, *_ in running for page in pages}
        assert cache.free_pages == 39 - len(held)
    assert admitted > 500 and hits > 500 and cache.facts().evicted_tokens
    for _, pages, *_ in running:
        cache.release(pages)
    assert cache.free_pages == 39
    cache.clear()
    assert sorted(pool._free) == list(range(1, 40)) and not cache._by_page and not cache._by_key


def test_the_oldest_goes_first_and_ends_before_beginnings() -> None:
    pool = PagePool(9, PAGE)
    cache = PrefixCache(pool, is_on=True)
    keys = {name: cache.keys([start] * 3 * PAGE) for name, start in (("a", 1), ("b", 2))}
    for name in ("a", "b", "a"):
        kept = cache.find(keys[name], drafts=False)
        pages = cache.take(kept, 3 - len(kept))
        cache.publish(keys[name], pages, 0)
        cache.release(pages)
    lengths = []
    for count in range(3, 9):
        pages = cache.take([], count)
        lengths.append((len(cache.find(keys["a"], False)), len(cache.find(keys["b"], False))))
        cache.release(pages)
    assert lengths[0] == (3, 2) and lengths[-1] == (0, 0)
    assert all(later <= earlier for earlier, later in pairwise(lengths))
    assert all(a == 3 or b == 0 for a, b in lengths)
