"""Loops are found where they are and only there; what evaluation prompts say is kept out."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ddtree.train.loops import COPIES, LEAST_TOKENS, loop_ends
from ddtree.train.overlap import GRAM_WORDS, EvaluationText, words_of

DICE = np.random.default_rng(0)
QUIET = DICE.permutation(1000).tolist()  # no token twice


@pytest.mark.parametrize("period", [1, 2, 5, 24, 40, 90])
@pytest.mark.parametrize("before", [0, 13])
def test_a_loop_is_cut_after_three_copies_with_48_repeated_tokens(period: int, before: int) -> None:
    stretch = [5000 + i for i in range(period)]
    answer = QUIET[:before] + stretch * 60
    repeated = max(2 * period, 48)
    assert loop_ends([answer[:320]]) == [before + period + repeated if before + period + repeated <= 320 else None]


def test_repetition_short_of_a_loop_is_left_alone() -> None:
    stretch = [5000 + i for i in range(30)]
    assert loop_ends([QUIET[:50] + stretch * 2 + QUIET[50:90]]) == [None]
    assert loop_ends([[7] * (LEAST_TOKENS)]) == [None]  # one token and 47 repetitions of it
    assert loop_ends([[7] * (LEAST_TOKENS + 1)]) == [LEAST_TOKENS + 1]
    assert loop_ends([QUIET, [], [1]]) == [None, None, None]
    assert COPIES == 3


def test_answers_are_judged_each_by_itself() -> None:
    """Random answers with and without loops, together, against a plain search in each one."""
    answers = []
    for _ in range(60):
        stretch = DICE.integers(0, 3, DICE.integers(1, 30)).tolist()
        head = DICE.integers(0, 50, DICE.integers(0, 40)).tolist()
        answers.append((head + stretch * int(DICE.integers(1, 30)))[:200])
    found = loop_ends(answers)
    assert found == [plain_loop_end(answer) for answer in answers]
    assert any(end is None for end in found) and any(end is not None for end in found)


def plain_loop_end(answer: list[int]) -> int | None:
    """The shortest beginning of the answer whose last tokens are a loop, by trying all."""
    for end in range(1, len(answer) + 1):
        for period in range(1, end // 3 + 1):
            repeated = max(2 * period, 48)
            start = end - repeated
            if start >= period and all(answer[i] == answer[i - period] for i in range(start, end)):
                return end
    return None


PROMPT = "Tom has 3 red apples, and Ann has twice as many green pears; how many do they have together?"


def test_thirteen_words_in_a_row_are_found_however_they_are_written() -> None:
    evaluation = EvaluationText([PROMPT])
    words = words_of(PROMPT)
    assert evaluation.shared("So: " + "  ".join(words[2:15]).upper() + "...") == " ".join(words[2:15])
    assert evaluation.shared(" ".join(words[2:14])) is None
    assert evaluation.shared(" ".join([*words[:8], "very", *words[8:]])) is None
    assert GRAM_WORDS == 13


def test_a_short_prompt_counts_as_a_whole() -> None:
    evaluation = EvaluationText(["Write a poem about the old harbour at night.", "Say hello."])
    assert evaluation.shared("Please WRITE a poem about the old harbour, at night!") is not None
    assert evaluation.shared("write a poem about the new harbour at night") is None
    assert evaluation.shared("say hello") is None  # two words say nothing


def test_an_allowed_sentence_does_not_count_but_what_stands_beside_it_does() -> None:
    ending = "Please reason step by step, and put your final answer within \\boxed{}."
    strict, lenient = EvaluationText([f"{PROMPT}\n{ending}"]), EvaluationText([f"{PROMPT}\n{ending}"], [ending])
    other = f"How far do the two trains travel together?\n{ending}"
    assert strict.shared(other) is not None
    assert lenient.shared(other) is None
    assert lenient.shared(PROMPT) is not None


def test_no_shared_run_is_missed() -> None:
    """Random texts over few words, against a plain comparison of all runs."""
    dice = random.Random(0)
    found = []
    for _ in range(200):
        prompts = [" ".join(dice.choices("abcd", k=dice.randint(13, 30))) for _ in range(3)]
        text = " ".join(dice.choices("abcde", weights=[9, 9, 3, 1, 0.2], k=60))
        if dice.random() < 0.5:
            start = dice.randint(0, 5)
            text += " e " + " ".join(prompts[0].split()[start : start + dice.randint(11, 15)])
        runs = {tuple(p.split()[i : i + 13]) for p in prompts for i in range(len(p.split()) - 12)}
        words = text.split()
        is_shared = any(tuple(words[i : i + 13]) in runs for i in range(len(words) - 12))
        assert (EvaluationText(prompts).shared(text) is not None) == is_shared
        found.append(is_shared)
    assert 30 < sum(found) < 170
