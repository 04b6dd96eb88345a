"""Exact mode: whatever drafts and whatever runs beside it, plain decoding's tokens and logits, bit for bit.

On the CPU the slow twins run; where there is a GPU, the fast kernels as well, through graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddtree import Completion, Engine, SamplingParams, Speculation
from ddtree.cli.loading import load_engine
from ddtree.cli.options import Mode, PairOptions
from ddtree.demo import drafter_folder
from ddtree.engine import round as round_module
from ddtree.engine import runner as runner_module
from ddtree.engine.cost_store import CostStore
from ddtree.errors import UserError
from pairs import Pair
from tiny_models import make_drafter, make_target

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = ["float32", "bfloat16"]
AR = Speculation("ar")
DRAFTS = [Speculation("chain"), Speculation("tree", 8), Speculation("tree", 32), Speculation("tree", 128)]
NEAR_EDGES = (60, 1, 63, 17, 58, 3, 31, 45)
"""Lengths of prompts whose answers run over the edges of tiles at 32 and 64 keys."""

N_NEW = 10
Logits = dict[tuple[int, int], torch.Tensor]


def models(tmp_path_factory: pytest.TempPathFactory, name: str, family: str, **settings: Any) -> Pair:
    folder = tmp_path_factory.mktemp(name)
    target = make_target(
        folder / "target", family, vocab_size=12, num_hidden_layers=2, head_dim=16, max_position_embeddings=1024,
        **settings,
    )  # fmt: skip
    return Pair(target, make_drafter(folder / "drafter", target, seed=11, taps=[0], n_layers=1, head_dim=16))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return models(tmp_path_factory, "exact", "qwen3")


@pytest.fixture(scope="session")
def sliding_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    windows = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    return models(tmp_path_factory, "exact-sliding", "qwen2", **windows)


@pytest.fixture(scope="session", params=[(device, dtype) for device in DEVICES for dtype in DTYPES], ids="-".join)
def engine(request: pytest.FixtureRequest, pair: Pair) -> Engine:
    return load(pair, *request.param)


def load(pair: Pair, device: str, dtype: str, **options: Any) -> Engine:
    settings = {"max_model_len": 256, "threads": 1, "graphs": "on", "exact": True, **options}
    return Engine.load(pair.target, pair.drafter, device=device, dtype=dtype, **settings)


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    """Distinct lengths, by which `recorded` knows the sequences."""
    assert len(set(lengths)) == len(lengths)
    return [[4 + (i * i + 3 * n) % 8 for i in range(n)] for n in lengths]


def tokens(done: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in done]


def one_by_one(engine: Engine, prompts: list[list[int]], each: list[SamplingParams]) -> list[list[int]]:
    return [tokens(engine.generate([p], s, speculation=AR))[0] for p, s in zip(prompts, each, strict=True)]


def kinds(n_prompts: int, n_new: int) -> list[list[SamplingParams]]:
    """Greedy; sampled; and a batch in which each sequence chooses in another way."""
    limits: dict[str, Any] = {"max_new_tokens": n_new, "ignore_eos": True}
    greedy = SamplingParams(**limits)
    sampled = [SamplingParams(**limits, temperature=0.9, seed=seed) for seed in range(n_prompts)]
    filtered = SamplingParams(**limits, temperature=1.2, top_p=0.8, top_k=7, min_p=0.02, seed=5)
    penalised = SamplingParams(**limits, temperature=1.0, seed=6, repetition_penalty=1.2, frequency_penalty=0.3)
    mixed = [(greedy, filtered, sampled[0], penalised)[i % 4] for i in range(n_prompts)]
    return [[greedy] * n_prompts, sampled, mixed]


def test_any_draft_in_any_batch_gives_the_tokens_of_plain_decoding(engine: Engine) -> None:
    prompts, n_new = prompts_of(NEAR_EDGES), 10
    accepted = 0
    for each in kinds(len(prompts), n_new):
        plain = one_by_one(engine, prompts, each)
        assert tokens(engine.generate(prompts, each, speculation=AR)) == plain
        for speculation, n in zip(DRAFTS, (8, 8, 3, 1), strict=True):  # on the CPU every node takes its time
            n = n if engine.target.device.type == "cpu" else 8
            done = engine.generate(prompts[:n], each[:n], speculation=speculation)
            assert tokens(done) == plain[:n], speculation
            accepted += sum(c.stats.rounds < n_new - 1 for c in done)
    assert accepted > 20  # drafts were taken, or nothing was tested


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_positions_over_the_edges_of_stretches(pair: Pair, device: str, dtype: str) -> None:
    engine = load(pair, device, dtype, max_model_len=600)
    prompts = prompts_of((509, 253))
    each = kinds(len(prompts), 8)[2]
    plain = one_by_one(engine, prompts, each)
    for speculation in (Speculation("chain"), Speculation("tree", 16)):
        assert tokens(engine.generate(prompts, each, speculation=speculation)) == plain


@pytest.mark.parametrize("device", DEVICES)
def test_sliding_window_layers(sliding_pair: Pair, device: str) -> None:
    engine = load(sliding_pair, device, "bfloat16")
    assert set(engine.target.config.sliding_windows) == {None, 20}
    prompts = prompts_of((5, 18, 60))
    each = kinds(len(prompts), 12)[0]
    plain = one_by_one(engine, prompts, each)
    for speculation in (Speculation("chain"), Speculation("tree", 24)):
        assert tokens(engine.generate(prompts, each, speculation=speculation)) == plain


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Logits]:
    """Gives the logits on accepted paths since it was last asked, by length of the prompt and position."""
    found: Logits = {}
    verify, decode_round = round_module.verify, runner_module.decode_round
    last: list[torch.Tensor] = []

    def kept_verify(*arguments: Any) -> Any:
        seen = verify(*arguments)
        last[:] = [seen.logits.clone()]
        return seen

    def kept_round(state: Any, batch: Any, *arguments: Any) -> Any:
        committed, lengths = batch.committed.tolist(), batch.prompt_tokens.tolist()
        played = decode_round(state, batch, *arguments)
        for i, accepted in enumerate(played.path.accepted.tolist()):
            for step, row in enumerate(played.path.rows[i, : accepted + 1].tolist()):
                found[lengths[i], committed[i] + step] = last[0][i, row]
        return played

    def take() -> Logits:
        taken = dict(found)
        found.clear()
        return taken

    monkeypatch.setattr(round_module, "verify", kept_verify)
    monkeypatch.setattr(runner_module, "decode_round", kept_round)
    return take


def differing(got: Logits, want: Logits) -> int:
    """Positions known to both whose logits differ in some bit."""
    both = got.keys() & want.keys()
    assert len(both) > len(want) / 2
    return sum(not torch.equal(got[key], want[key]) for key in both)


def logits_of(engine: Engine, recorded: Callable[[], Logits], prompts: list[list[int]], how: Speculation) -> Logits:
    params = SamplingParams(max_new_tokens=N_NEW, ignore_eos=True)
    engine.generate(prompts, params, speculation=how)
    return recorded()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_logits_are_those_of_plain_decoding_bit_for_bit(
    pair: Pair, recorded: Callable[[], Logits], device: str, dtype: str
) -> None:
    engine = load(pair, device, dtype, graphs="off")
    prompts = prompts_of(NEAR_EDGES[:4])
    plain: Logits = {}
    for prompt in prompts:
        plain |= logits_of(engine, recorded, [prompt], AR)
    assert len(plain) == len(prompts) * (N_NEW - 1)
    for speculation in (AR, *DRAFTS[: None if device == "cuda" else 3]):
        assert differing(logits_of(engine, recorded, prompts, speculation), plain) == 0
    small_chunks = load(pair, device, dtype, graphs="off", prefill_tokens=7, prefix_cache=True)
    for hits in range(2):  # the second time prompts are found in the cache
        assert differing(logits_of(small_chunks, recorded, prompts, Speculation("tree", 8)), plain) == 0, hits
    assert small_chunks.occupancy().prefix_tokens > 0


def test_without_exact_mode_logits_differ_in_bfloat16(pair: Pair, recorded: Callable[[], Logits]) -> None:
    engine = load(pair, "cpu", "bfloat16", exact=False)
    prompts = prompts_of((60,))
    plain = logits_of(engine, recorded, prompts, AR)
    tree = logits_of(engine, recorded, prompts, Speculation("tree", 32))
    same = {key: tree[key] for key in tree.keys() & plain.keys()}
    assert any(not torch.equal(same[key], plain[key]) for key in same)


def test_check_lossless_finds_no_near_tie(engine: Engine) -> None:
    prompt = prompts_of((60,))[0]
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    done = engine.generate([prompt], params, speculation=Speculation("tree", 32))[0]
    assert engine.check_lossless(prompt, done.token_ids).differing == []


def test_the_engine_says_that_it_is_exact_and_what_that_costs(pair: Pair) -> None:
    engine, other = load(pair, "cpu", "float32"), load(pair, "cpu", "float32", exact=False)
    facts, plain = engine.facts(), other.facts()
    assert (facts["exact"], plain["exact"]) == (True, False)
    assert "n + 1 steps" in facts["exact_cost"] and plain["exact_cost"] is None
    assert CostStore(facts)._name != CostStore(plain)._name
    assert CostStore(facts)._name != CostStore(facts | {"exact": False})._name
    params = SamplingParams(max_new_tokens=2)
    assert any("exact mode" in note for note in engine.generate([[5]], params)[0].stats.notes)
    assert other.generate([[5]], params)[0].stats.notes == []


def test_the_flag_reaches_the_engine(pair: Pair) -> None:
    for exact in (False, True):
        options = PairOptions(model=pair.target, draft=pair.drafter, device="cpu", exact=exact, max_model_len=64)
        engine = load_engine(options, Mode.tree, Speculation("tree", 4), lambda stage, fraction: None)
        assert engine.facts()["exact"] is exact


def test_a_gpu_without_fast_kernels_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree.engine.loading.choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("ddtree.engine.loading.why_not_fast", lambda device: "triton is not installed")
    with pytest.raises(UserError, match="exact mode has no kernels for this device: triton is not installed"):
        load(pair, "cuda", "float32")


def test_the_real_pair_in_bfloat16(target_folder: Any) -> None:
    engine = Engine.load(
        target_folder, drafter_folder(), device=DEVICES[-1], dtype="bfloat16", max_model_len=512, max_batch=2,
        graphs="on", exact=True,
    )  # fmt: skip
    prompts = ["1, 2, 3, 4, 5,", "def add(a, b):\n    return"]
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    plain = [engine.generate([prompt], params, speculation=AR)[0].token_ids for prompt in prompts]
    done = engine.generate(prompts, params, speculation=Speculation("tree", 8))
    assert tokens(done) == plain
    assert max(completion.stats.tau for completion in done) > 1.5
