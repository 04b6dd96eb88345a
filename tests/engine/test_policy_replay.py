"""`auto` over recorded answers of the demo's pair, with the round times of an H200, against every fixed budget.

The tapes hold what trees promised and held at every place of 14 answers (`benchmarks/policy_replay.py record`); what a
fixed budget makes of them is added up, not estimated.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ddtree.engine.budget_policy import CANDIDATES, BudgetPolicy

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from policy_replay import Tape, closed_loop, read_costs, read_tapes, replay, taus  # noqa: E402

COSTS = read_costs(ROOT / "benchmarks" / "results" / "h200" / "engine_load_trained_bfloat16.json")
TAPES = read_tapes(Path(__file__).parent / "data" / "tapes.npz")
CHAT = [tape for tape in TAPES if tape.kind == "mt_bench"]
OTHERS = [tape for tape in TAPES if tape.kind != "mt_bench"]


@pytest.mark.parametrize("concurrency", [1, 4, 16, 64])
@pytest.mark.parametrize("tapes", [CHAT, OTHERS], ids=["chat", "maths and code"])
def test_from_a_cold_start_auto_is_within_3_percent_of_the_best_fixed_budget(tapes, concurrency):
    told = replay(tapes, COSTS, concurrency, seeds=3)
    assert told["auto_against_best"] > 0.97, told


@pytest.mark.parametrize("concurrency", [1, 64])
def test_after_chat_it_finds_its_way_back(concurrency):
    policy = BudgetPolicy(15)
    policy.cost_ms.update(COSTS)
    closed_loop(CHAT, COSTS, concurrency, policy, seed=1, answers=6 * concurrency + 30)
    ways = {way: closed_loop(OTHERS, COSTS, concurrency, way, 2, 6 * concurrency + 60).tok_s for way in (7, 15, 31)}
    auto = closed_loop(OTHERS, COSTS, concurrency, policy, 2, 6 * concurrency + 60).tok_s
    assert auto > 0.96 * max(ways.values())


def test_tau_is_of_whole_answers_from_their_beginning():
    """10 places; trees of 3 hold one token everywhere, those of 7 three at even places and none at odd ones."""
    held = np.zeros((10, 6), np.int64)
    held[:, 0], held[::2, 1] = 1, 3
    tape = Tape("made up", np.zeros((10, 6, 15)), held)
    told = taus([tape, tape])["made up"]
    assert told["3"] == 2.0 and told["15"] == 1.0
    assert told["7"] == pytest.approx(10 / 3, abs=1e-3)  # 4 + 4 + 2, cut by the end


def test_rounds_take_what_the_tape_holds():
    held = np.tile(np.array([1, 2, 3, 4, 5, 6]), (3000, 1))  # by budget, everywhere
    tape = Tape("made up", np.zeros((3000, 6, 15)), held)
    costs = {(2, budget): 0.5 for budget in CANDIDATES}
    for place, budget in enumerate(CANDIDATES):  # two sequences, of one token and those held each, every half a ms
        run = closed_loop([tape], costs, 2, budget, seed=3, answers=4)
        assert run.tok_s == pytest.approx(2 * (1 + place) * 2000, rel=0.002)
