"""The demo's verdicts and figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddtree.cli.comparison import MODES, ModeRun, Verdict, judge, mode_order, mode_rows


def engine(faults: int = 0, ties: tuple[tuple[int, float], ...] = ()) -> Any:
    report = SimpleNamespace(faults=faults, near_ties=[SimpleNamespace(index=index, gap=gap) for index, gap in ties])
    return SimpleNamespace(check_lossless=lambda prompt, token_ids: report)


def test_equal_texts_are_the_same_whatever_the_target_says() -> None:
    assert judge(engine(faults=1), "p", [1, 2], [1, 2]).kind == "same"


def test_texts_that_part_at_a_near_tie() -> None:
    verdict = judge(engine(ties=((0, 0.5), (1, 0.125))), "p", [1, 2, 3], [1, 9, 3])
    assert (verdict.kind, verdict.token, verdict.gap) == ("near-tie", 1, 0.125)
    assert str(verdict) == "near-tie at token 1 (gap 0.125)"


def test_a_token_far_from_the_top_is_a_fault() -> None:
    assert str(judge(engine(faults=1), "p", [1, 2], [1, 3])) == "FAULT at token 1"


def test_a_text_that_ends_early_is_a_fault() -> None:
    assert judge(engine(), "p", [1, 2], [1, 2, 3]).kind == "fault"


def test_every_mode_runs_in_every_place() -> None:
    orders = [mode_order(0, prompt) for prompt in range(3)]
    assert all({order[place] for order in orders} == set(MODES) for place in range(3))
    assert mode_order(1, 0) != mode_order(0, 0)


def run(mode: str, lengths: list[int], total_ms: list[float], verdict: str = "same") -> ModeRun:
    def completion(ms: float) -> Any:
        stats = SimpleNamespace(mode=mode, budget=8, accepted_lengths=lengths, rounds=len(lengths), round_ms=[ms])
        return SimpleNamespace(stats=stats)

    return ModeRun([completion(ms) for ms in total_ms], Verdict(verdict, 3, 0.1))


def test_figures_are_totals_over_prompts_of_medians_over_repetitions() -> None:
    rows = mode_rows(
        {
            "ar": [run("ar", [1] * 10, [1000, 1000, 9000]), run("ar", [1] * 10, [1000])],
            "tree": [run("tree", [5, 5], [200, 200, 900]), run("tree", [4, 6], [300], "near-tie")],
        }
    )
    assert [row.decode_tok_s for row in rows] == pytest.approx([10.0, 40.0])
    assert [row.tau for row in rows] == pytest.approx([1.0, 5.0])
    assert rows[1].speed_against_ar == pytest.approx(4.0)
    assert [row.verdict.kind for row in rows] == ["same", "near-tie"]


def test_an_answer_without_rounds_divides_nothing_by_zero() -> None:
    rows = mode_rows({"ar": [run("ar", [], [0.0])], "tree": [run("tree", [], [0.0])]})
    assert [(row.decode_tok_s, row.tau, row.speed_against_ar) for row in rows] == [(0, 0, 0), (0, 0, 0)]
