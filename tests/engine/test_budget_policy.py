"""Which budget `auto` takes, on made-up machines and texts."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from ddtree import Engine, SamplingParams, Speculation
from ddtree.engine.budget_policy import CANDIDATES, CUTS, HOLD, LAST_PROBE, BudgetPolicy, Outlook
from ddtree.engine.runner import EagerRunner
from ddtree.kernels.forecast import Forecast, forecast, read_forecast
from ddtree.kernels.tree_build import build_tree
from ddtree.kernels.tree_walk import walk_tree
from tiny_models import make_drafter, make_target

DEPTHS = 4
FLAT = {budget: 1.0 + budget / 1000 for budget in CANDIDATES}  # launch-bound: a large tree costs little
STEEP = {budget: 1.0 + budget for budget in CANDIDATES}  # compute-bound: every node costs a step


def promise(easy):
    """Larger trees cover more; in hard text nearly nothing."""
    cut, depth = np.arange(len(CUTS))[:, None], np.arange(1, DEPTHS + 1)
    held = np.minimum(np.arange(len(CUTS)) + 1, DEPTHS if easy else 0)
    return Forecast((0.55 + 0.08 * cut if easy else 0.05 + 0 * cut)[None] ** depth, held[None])


def run(costs, texts, rounds=60):
    """Play rounds in which the target agrees with the drafter's promises; returns the budgets."""
    policy, outlook, budgets = BudgetPolicy(DEPTHS), Outlook(), []
    for budget, ms in costs.items():
        policy.time(1, budget, ms)
    for turn in range(rounds):
        easy = texts(turn)
        budget = policy.choose(1, [outlook])
        budgets.append(budget)
        if budget:
            policy.learn([outlook], budget, promise(easy))
        policy.time(1, budget, costs[budget])
    return budgets


def test_cheap_nodes_and_easy_text_take_large_trees():
    assert run(FLAT, lambda turn: True)[-1] >= 63


def test_every_candidate_fills_the_tiles_of_matrix_products():
    """A round's rows are the root and the nodes; 17 rows take as long as 24 or 32 would."""
    assert all((budget + 1).bit_count() == 1 for budget in CANDIDATES)


def test_dear_nodes_and_easy_text_take_small_trees_or_none():
    assert run(STEEP, lambda turn: True)[-1] <= 4


def test_hard_text_falls_back_to_plain_decoding_and_probes_ever_less():
    budgets = run({**STEEP, 0: 1.0}, lambda turn: False, rounds=400)
    drafts = [turn for turn, budget in enumerate(budgets) if budget]
    gaps = [b - a for a, b in pairwise(drafts[2:])]
    assert gaps == sorted(gaps) and gaps[-1] == LAST_PROBE
    assert len(drafts) < 20


def test_text_that_turns_easy_again_is_noticed():
    dear = {budget: 1.0 if budget == 0 else 1.5 + budget / 100 for budget in CANDIDATES}
    budgets = run(dear, lambda turn: turn < 40 or turn > 160, rounds=300)
    assert budgets[35] > 0
    assert sum(budgets[100:150]) < 40
    assert min(budgets[-40:]) > 0


def test_a_drafter_that_promises_too_much_is_trusted_less():
    expected = []
    for held in (0, DEPTHS):
        policy, outlook = BudgetPolicy(DEPTHS), Outlook()
        for _ in range(100):
            policy.learn([outlook], 15, Forecast(promise(easy=True).masses, np.full((1, len(CUTS)), held)))
        expected.append(policy.expected_tokens([outlook])[CANDIDATES.index(15)])
    assert expected[0] < 0.7 * expected[1]


@pytest.mark.parametrize(("held_beyond_15", "best"), [(1.0, 63), (0.1, 15)])
def test_what_the_far_nodes_hold_decides(held_beyond_15, best):
    """Each cut promises 0.6 nodes more; the target keeps all of the promises or less of those beyond 15."""
    policy, outlook, random = BudgetPolicy(DEPTHS), Outlook(), np.random.default_rng(1)
    promised = np.repeat(0.6 * np.arange(1, len(CUTS) + 1)[:, None] / DEPTHS, DEPTHS, axis=1)
    ratios = [1.0 if cut <= 15 else held_beyond_15 for cut in CUTS]
    costs = {0: 1.0, 3: 1.0, 7: 1.05, 15: 1.1, 31: 1.2, 63: 1.3, 127: 2.5}
    for budget, ms in costs.items():
        policy.time(1, budget, ms)
    budgets = []
    for _ in range(900):
        budgets.append(policy.choose(1, [outlook]))
        held = np.cumsum(random.random(len(CUTS)) < 0.6 * np.array(ratios))
        policy.learn([outlook], budgets[-1], Forecast(promised[None], held[None]))
        policy.time(1, budgets[-1], costs[budgets[-1]])
    assert sum(budget == best for budget in budgets[-300:]) > 250  # the others look what a larger tree promises


def test_rounds_that_a_busy_host_held_up_do_not_move_the_choice():
    """One round in 30 takes ten times as long, whatever its budget; 15 is worth 8 % more than 7 and 31."""
    policy, outlook, random = BudgetPolicy(DEPTHS), Outlook(), np.random.default_rng(2)
    promised = np.array([1.0, 2.0, 2.7, 3.1, 3.3, 3.4])[:, None] / DEPTHS * np.ones(DEPTHS)
    costs = {0: 1.0, 3: 1.0, 7: 1.1, 15: 1.25, 31: 1.5, 63: 1.9, 127: 2.5}
    for budget, ms in costs.items():
        policy.time(1, budget, ms)
    budgets = []
    for _ in range(3000):
        budgets.append(policy.choose(1, [outlook]))
        policy.learn([outlook], budgets[-1], Forecast(promised[None], np.round(promised.sum(1)[None]).astype(int)))
        policy.time(1, budgets[-1], costs[budgets[-1]] * (10 if random.random() < 1 / 30 else 1))
    assert sum(budget == 15 for budget in budgets[100:]) > 0.85 * 2900


def test_a_choice_holds_for_some_rounds_and_a_look_for_one():
    """What `learn` hears of is every choice and every look, and nothing between."""
    policy, outlook = BudgetPolicy(DEPTHS), Outlook()
    costs = {0: 1.0, 3: 1.0, 7: 1.0, 15: 1.0, 31: 8.0, 63: 9.0, 127: 10.0}  # 15 it is
    for budget, ms in costs.items():
        policy.time(1, budget, ms)
    rounds = []
    for _ in range(4000):
        budget, is_news = policy.next_round(1, [outlook])
        rounds.append((budget, is_news))
        if is_news:
            policy.learn([outlook], budget, promise(easy=True))
    settled = rounds[400:]
    told = [place for place, (_, is_news) in enumerate(settled) if is_news]
    gaps = {b - a for a, b in pairwise(told)}
    assert gaps == {1, HOLD}
    assert all(settled[a][0] == 31 for a, b in pairwise(told) if b - a == 1)  # looks
    assert all(settled[place][0] == settled[place - 1][0] for place in range(told[0] + 1, 3600) if place not in told)
    assert {budget for budget, _ in settled} == {15, 31}


def test_forecast_sums_the_nodes_of_each_smaller_tree():
    log_probs = torch.tensor([[[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]]]).log()
    tokens = torch.arange(3).expand(1, 2, 3)
    tree = build_tree(log_probs, tokens, torch.tensor([0]), 4, torch.tensor([2]))
    # best first: 0.7 (depth 1), 0.42 (depth 2), 0.21 (depth 2), 0.2 (depth 1); the target takes the first and the third
    path = walk_tree(tree, torch.tensor([[0, 1, 9, 9, 9]]), 2)
    told = forecast(tree, path, torch.tensor([[7, 8]]), (1, 2, 3, 4, 9), 2)
    assert told[0, :2].tolist() == [7, 8]
    told = read_forecast(told[:, 2:].numpy(), 2)
    masses = [[0.7, 0.0], [0.7, 0.42], [0.7, 0.63], [0.9, 0.63], [0.9, 0.63]]
    assert told.masses[0] == pytest.approx(np.array(masses), abs=1e-5)
    assert told.held.tolist() == [[1, 1, 2, 2, 2]]


def test_auto_gives_the_text_of_plain_decoding_whatever_it_takes(tmp_path):
    """Also through spells of plain decoding, after which the drafter's context must be complete."""
    target = make_target(tmp_path / "target", "qwen3", eos_token_id=None)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=6)
    engine = Engine.load(target, drafter, dtype="float32", max_model_len=128, max_batch=3)
    prompts, params = [[5, 9, 4], [7] * 11, [20, 21]], SamplingParams(max_new_tokens=60, temperature=0.7, seed=3)
    expected = [c.token_ids for c in engine.generate(prompts, params, speculation=Speculation("ar"))]
    policy = engine._scheduler._policy
    turns = iter(range(10**6))
    policy.choose = lambda bucket, outlooks: (0, 0, 8, 4, 0, 32)[next(turns) % 6]  # a policy that cannot decide
    done = engine.generate(prompts, params, speculation=Speculation("tree"))
    assert [c.token_ids for c in done] == expected
    assert {0, 4, 8, 32} <= set(done[0].stats.round_budgets)
    assert done[0].stats.budget == "auto"


def test_each_sequence_of_a_batch_is_told_of_its_own_round(tmp_path):
    """Also where others of the batch have ended meanwhile."""
    target = make_target(tmp_path / "target", "qwen3", eos_token_id=None)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=6)
    engine = Engine.load(target, drafter, dtype="float32", max_model_len=128, max_batch=3)
    policy, told = engine._scheduler._policy, {}
    policy.cost_ms = {(batch, budget): 1.0 for batch in (1, 2, 3) for budget in CANDIDATES}  # nothing to measure
    policy.choose = lambda bucket, outlooks: 32
    learn = policy.learn

    def listen(outlooks, budget, forecast):
        for outlook, held in zip(outlooks, forecast.held, strict=True):
            told.setdefault(id(outlook), []).append(int(held[-1]))
        learn(outlooks, budget, forecast)

    policy.learn = listen
    sequences = [
        engine.submit(prompt, SamplingParams(max_new_tokens=limit), speculation=Speculation("tree"))
        for prompt, limit in (([5, 9, 4], 60), ([7] * 11, 15), ([20, 21], 40))
    ]
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    lengths = [sequence.stats.accepted_lengths[:-1] for sequence in sequences]  # the last one may be cut
    assert [[held + 1 for held in told[id(s.outlook)]][:-1] for s in sequences] == lengths
    assert any(len(set(each)) > 1 for each in lengths) and len({tuple(each) for each in lengths}) == 3


def test_plain_spells_leave_the_drafter_as_fixed_budgets_do(tmp_path):
    """A draft after a spell of plain decoding equals the draft of an engine that drafted all along."""
    target = make_target(tmp_path / "target", "llama", eos_token_id=None)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=6)
    logits = []
    for budgets in ([0, 0, 0, 0, 0, 0, 8], [8] * 40):
        engine = Engine.load(target, drafter, dtype="float32", max_model_len=64, max_batch=1)
        turns = iter([*budgets, *[8] * 60])
        engine._scheduler._policy.cost_ms = {(1, budget): 1.0 for budget in CANDIDATES}  # nothing to measure
        engine._scheduler._policy.choose = lambda bucket, outlooks, turns=turns: next(turns)
        kept = {}
        draft = type(engine.drafter).draft

        def keep(self, roots, run, cache, kept=kept, draft=draft, engine=engine):
            kept[int(engine.state.committed[0])] = draft(self, roots, run, cache)
            return kept[int(engine.state.committed[0])]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(engine.drafter), "draft", keep)
            engine.generate([[5, 9, 4]], SamplingParams(max_new_tokens=30), speculation=Speculation("tree"))
        logits.append(kept)
    common = set(logits[0]) & set(logits[1]) - {0}
    assert common
    for position in common:
        torch.testing.assert_close(logits[0][position], logits[1][position], rtol=1e-4, atol=1e-4)


def test_costs_are_measured_once_for_a_machine_and_its_models(tmp_path, monkeypatch):
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "cache"))
    target = make_target(tmp_path / "target", "llama")
    drafter = make_drafter(tmp_path / "drafter", target, block_size=6)
    measured = []
    measure = EagerRunner.measure
    monkeypatch.setattr(EagerRunner, "measure", lambda *a: measured.append(a[2].budget) or measure(*a))
    prepared = []
    monkeypatch.setattr(EagerRunner, "prepare", lambda *a: prepared.append((a[1], a[2].budget)))
    stages = []
    for _ in range(2):
        engine = Engine.load(
            target, drafter, dtype="float32", max_model_len=64, on_progress=lambda stage, fraction: stages.append(stage)
        )
        done = engine.generate([[5, 6]], SamplingParams(max_new_tokens=8))[0]
        assert done.stats.notes == []
    assert measured == list(CANDIDATES)
    assert prepared == 2 * [(1, budget) for budget in CANDIDATES]  # graphs last no longer than a process
    assert "timing rounds of every budget" in stages

    done = engine.generate([[5, 6], [7]], SamplingParams(max_new_tokens=8))
    assert "timing rounds of a batch of 2" in done[0].stats.notes[0]


def test_a_cap_holds_for_every_budget_that_auto_takes(tmp_path):
    target = make_target(tmp_path / "target", "llama", eos_token_id=None)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=6)
    engine = Engine.load(target, drafter, dtype="float32", max_model_len=64, speculation=Speculation("tree", "auto", 2))
    engine._scheduler._policy.choose = lambda bucket, outlooks: 16
    done = engine.generate([[5, 6]], SamplingParams(max_new_tokens=20), record_trees=True)[0]
    for traced in done.trees:
        siblings = [traced.tree.parents.tolist().count(parent) for parent in set(traced.tree.parents.tolist())]
        assert max(siblings) == 2


def test_budgets_of_a_new_batch_size_are_timed_one_after_each_round(tmp_path, monkeypatch):
    """All of them at once would stop streams that run for as long as that takes."""
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "cache"))
    target = make_target(tmp_path / "target", "llama", eos_token_id=None)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=6)
    engine = Engine.load(target, drafter, dtype="float32", max_model_len=256)
    events: list[object] = []
    launch = EagerRunner.launch

    def timed(self, bucket, shape, flags):
        events.append(shape.budget)
        return 1.0 + shape.budget

    monkeypatch.setattr(EagerRunner, "measure", timed)
    monkeypatch.setattr(EagerRunner, "launch", lambda *a, **k: events.append("round") or launch(*a, **k))
    done = engine.generate([[5, 6], [7]], SamplingParams(max_new_tokens=60))
    firsts = [event for pair in zip(CANDIDATES, ["round"] * len(CANDIDATES), strict=True) for event in pair]
    assert events[: len(firsts)] == firsts
    assert [note for note in done[0].stats.notes if "timing rounds" in note] == [
        "some time went into timing rounds of a batch of 2, which no round's time shows"
    ]


def test_where_rounds_overlap_those_that_are_learned_from_are_timed(tmp_path, monkeypatch):
    """By the device's clock, since the host's shows how long the host was busy."""
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "cache"))
    target = make_target(tmp_path / "target", "llama", eos_token_id=None)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=6)
    monkeypatch.setattr(EagerRunner, "measure", lambda self, bucket, shape, flags: 1.0)
    engine = Engine.load(target, drafter, dtype="float32", max_model_len=256)
    launched: list[tuple[int, bool]] = []

    class Clocked(EagerRunner):
        overlaps = True

        def launch(self, slots, shape, flags, context_bound, is_timed=False):
            launched.append((shape.budget, is_timed))
            fresh = super().launch(slots, shape, flags, context_bound)
            fresh.flight.device_ms = lambda: 1.2 if is_timed else None
            return fresh

    engine._runner = engine._scheduler._runner = Clocked(engine.state, engine.target, engine.drafter)
    engine.generate([[5, 6]], SamplingParams(max_new_tokens=200, ignore_eos=True))
    timed = Counter(budget for budget, is_timed in launched if is_timed)
    assert len(launched) / 8 < timed.total() < len(launched)
    costs = {budget: ms for (_, budget), ms in engine._scheduler.round_costs_ms().items()}
    assert set(timed) <= set(costs)
    for budget, ms in costs.items():
        n = timed[budget]  # the last of all was launched, but is not read any more
        assert any(ms == pytest.approx(1.2 - 0.2 * 0.9**read) for read in (n, max(n - 1, 0))), (budget, n, ms)


def constant(levels, batch):
    """Every cut promises so many nodes of depth 1, and all of them hold."""
    masses = np.zeros((batch, len(CUTS), DEPTHS))
    masses[..., 0] = levels
    return Forecast(masses, np.rint(masses[..., 0]).astype(np.int64))


def usual(policy):
    """What is expected of a sequence that nothing is known of, by budget, without the first token."""
    return policy.expected_tokens([Outlook()])[1:] - 1


def test_larger_trees_that_were_not_seen_move_along_with_those_that_were():
    policy = BudgetPolicy(DEPTHS)
    for _ in range(50):
        policy.learn([Outlook() for _ in range(16)], 127, constant(np.arange(1, 7), 16))
    before = policy._usual[:, 0].copy()
    for _ in range(40):  # one more node at budget 7, whose round says nothing of larger ones
        policy.learn([Outlook() for _ in range(16)], 7, constant(np.array([2, 3, 3, 3, 3, 3]), 16))
    moved = policy._usual[:, 0] - before
    assert moved[1] > 0.4 and moved[2:] == pytest.approx(moved[1])


@pytest.mark.parametrize(("batch", "least", "most"), [(1, 0.01, 0.04), (16, 0.2, 0.35)])
def test_what_was_not_seen_for_long_is_forgotten_faster_where_many_tell_of_it(batch, least, most):
    policy = BudgetPolicy(DEPTHS)
    for _ in range(60):
        policy.learn([Outlook() for _ in range(batch)], 127, constant(np.arange(1, 7), batch))
    for _ in range(30):
        policy.learn([Outlook() for _ in range(batch)], 3, constant(np.ones(6), batch))
    steps = []
    for _ in range(2):  # now the largest tree brings four more
        before = policy._usual[-1, 0]
        policy.learn([Outlook() for _ in range(batch)], 127, constant(np.array([1, 2, 3, 4, 5, 10]), batch))
        steps.append((policy._usual[-1, 0] - before) / (10 - before))
    assert least < steps[0] < most and steps[1] == pytest.approx(0.02, abs=0.002)


def test_first_looks_go_to_a_large_tree_that_does_not_cost_twice_the_smallest():
    for costs, want in (
        ({0: 1.0, 3: 1.1, 7: 1.2, 15: 1.4, 31: 1.9, 63: 2.1, 127: 2.2}, 63),  # a GPU
        ({0: 1.0, 3: 1.5, 7: 2.0, 15: 2.9, 31: 4.5, 63: 8.0, 127: 16.0}, 15),  # a processor
        ({0: 1.0, 3: 1.5}, 3),
        ({0: 1.0}, 0),
    ):
        policy = BudgetPolicy(DEPTHS)
        for budget, ms in costs.items():
            policy.time(1, budget, ms)
        assert policy.choose(1, [Outlook()]) == want


def test_a_budget_that_was_timed_later_is_looked_at():
    policy = BudgetPolicy(DEPTHS)
    for budget in (0, 3):
        policy.time(1, budget, 1.0 + budget)
    for _ in range(10):
        if taken := policy.choose(1, [Outlook()]):
            policy.learn([Outlook()], taken, constant(np.ones(6), 1))
    policy.time(1, 7, 5.0)
    assert policy.choose(1, [Outlook()]) == 7


def test_a_drafter_that_is_out_of_its_mind_for_a_round_changes_nothing():
    """Scores that are no numbers, as they come from the device: whole numbers of which none is a probability."""
    log_probs = torch.full((1, DEPTHS, 8), -1.0)
    tree = build_tree(log_probs, torch.zeros(1, DEPTHS, 8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 15,
                      torch.full((1,), DEPTHS))  # fmt: skip
    tree.scores[:, 1:] = torch.nan
    path = walk_tree(tree, torch.zeros_like(tree.tokens), DEPTHS)
    told = forecast(tree, path, torch.zeros(1, 0, dtype=torch.int64), CUTS, DEPTHS)
    bad = read_forecast(told.numpy(), DEPTHS)
    for rounds in (0, 5):
        policy = BudgetPolicy(DEPTHS)
        for budget, ms in FLAT.items():
            policy.time(1, budget, ms)
        for _ in range(rounds):
            policy.learn([Outlook()], 15, constant(np.arange(1, 7), 1))
        before = usual(policy)
        for _ in range(4):
            policy.choose(1, [Outlook()])
            policy.learn([Outlook()], 63, bad)
        assert (usual(policy) == before).all()
        assert policy._learned == rounds + 4, "first looks would never end"
