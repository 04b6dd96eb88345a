"""Which answers are right, and where two answers part."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.chat_server import answering
from ddtree.bench.grade.collect import Collected, collect
from ddtree.bench.grade.parting import Chance, parting
from ddtree.bench.grade.problem import graded, number_of, program_of
from ddtree.bench.grade.run import GradeOptions, judge_references, run_grade
from ddtree.bench.grade.sandbox import Limits, find_sandbox
from ddtree.bench.plan import parse_variant
from ddtree.bench.workload import Problem, Workload, read_workload
from ddtree.errors import UserError

PROMPT = 'from math import floor\n\ndef half(x):\n    """Half of x."""\n'
HALF = Problem(
    "half",
    ("Write half",),
    {
        "prompt": PROMPT,
        "entry_point": "half",
        "test": "def check(f):\n    assert f(4) == 2\n    assert f(5) == 2\n",
        "canonical_solution": "    return floor(x / 2)\n",
    },
)
TWICE = Problem(
    "twice", ("Write twice",), {"test_list": ["assert twice(2) == 4"], "code": "def twice(x): return 2 * x"}
)
SUM = Problem("sum", ("What is 1,000 + 18?",), {"answer": "1018"})


@pytest.fixture(scope="module")
def box():
    try:
        return find_sandbox(Limits(wall_s=5.0), is_unsafe=False)
    except UserError as error:
        pytest.skip(f"no sandbox on this machine: {error}")


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("```python\nfrom math import floor\ndef half(x):\n    return floor(x / 2)\n```", True),
        ("Sure:\n```\ndef half(x):\n    return floor(x / 2)\n```\nIt uses `floor`.", True),  # import from the prompt
        ("```python\ndef other(): pass\n```\nand\n```py\ndef half(x):\n    return x // 2\n```", True),
        ("    return x // 2\n", True),  # bare continuation
        ("return x // 2", True),
        ("```python\nreturn x // 2\n```", True),
        ("def half(x):\n    return x / 2", False),
        ("```python\ndef half(x):\n    return x // 2", True),  # cut off before the fence ends
        ("I cannot do that.", False),
        ("", False),
    ],
)
def test_answers_become_programs(box, answer, is_right):
    (problem,), _ = graded(Workload("w", "made", (HALF,)))
    assert (box.run(program_of(problem, answer)).how == "passed") is is_right


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("so \\boxed{1,018}.", "1018"),
        ("\\boxed{\\text{about } 12} no, \\boxed{$18.00}", "18"),
        ("It is 3 and 4, thus 7", "7"),
        ("#### -5", "-5"),
        ("0.50 dollars", "0.5"),
        ("none", None),
        ("100", "100"),
    ],
)
def test_final_numbers(answer, number):
    assert number_of(answer) == number


def test_references(box):
    assert [outcome.how for _, outcome in judge_references(Workload("w", "made", (HALF, TWICE)), box)] == ["passed"] * 2
    with pytest.raises(UserError, match="no solutions"):
        judge_references(Workload("w", "made", (SUM,)), box)
    with pytest.raises(UserError, match="cannot be graded"):
        graded(Workload("w", "made", (Problem("x", ("hi",)),)))


def test_references_of_the_public_sets(box):
    benchmark_prompts = Path(__file__).parents[3] / "shared" / "data" / "prompts"
    if not benchmark_prompts.is_dir():
        pytest.skip("the benchmark prompts are not beside this checkout")
    patient = find_sandbox(Limits(wall_s=60.0, cpu_s=30), is_unsafe=False)
    for name, limit in (("humaneval", 12), ("mbpp", 12)):  # `ddtree grade --reference` runs all of them
        workload = read_workload(str(benchmark_prompts / f"{name}.jsonl"), limit=limit)
        assert {outcome.how for _, outcome in judge_references(workload, patient)} == {"passed"}


def chance(token, logprob=-0.1, *top):
    return Chance(token=token, logprob=logprob, top=[(token, logprob), *top])


def test_parting():
    a = [chance("The"), chance(" sky", -0.7, (" air", -0.72)), chance(" is")]
    near = [chance("The"), chance(" air", -0.70, (" sky", -0.71)), chance("!")]
    found = parting(near, a, ("x", "y"), 0.5)
    assert (found.kind, found.index, found.token, found.other) == ("near-tie", 1, " air", " sky")
    assert found.gap_nats == pytest.approx(0.02)
    assert parting(near, a, ("x", "y"), 0.001).kind == "fault"
    unheard = [chance("The"), chance("?", -0.1, (" sky", -0.2))]
    assert parting(unheard, a, ("x", "y"), 0.5).kind == "fault"  # no alternative of the other side at all
    assert parting(unheard, a, ("x", "y"), 0.5).gap_nats is None
    assert parting(a, a, ("x", "x"), 0.5).kind == "same"
    assert parting(None, None, ("x", "x"), 0.5).kind == "same"
    assert parting(None, None, ("x", "y"), 0.5).kind == "unknown"
    assert parting(a[:2], a, ("x", "y"), 0.5).kind == "unknown"


def test_a_lopsided_tie_is_a_fault():
    """Each side's own numbers count: one that was sure of its token makes the other's choice a fault."""
    sure = [chance("A", -0.01, ("B", -5.0))]
    unsure = [chance("B", -0.69, ("A", -0.70))]
    assert parting(unsure, sure, ("B", "A"), 0.5).kind == "fault"


def graded_with(url, folder, box, **more):
    options = GradeOptions(
        sides=(("ar", url, parse_variant("ar")), ("tree", url, parse_variant("tree"))),
        workload=Workload("w", "made", (HALF, TWICE, SUM)),
        folder=folder,
        **more,
    )
    return run_grade(options, box)


def answer_of(body):
    """Right everywhere, but that the tree says 17 at a near-tie, and a 400 for nothing."""
    text = body["messages"][-1]["content"]
    if "half" in text:
        return [("def half(x):\n    return x // 2", -0.1, [])]
    if "twice" in text:
        return [("def twice(x):\n    return x + x", -0.1, [])]
    ours, theirs = (" 1017", " 1018") if body["ddtree"]["mode"] == "tree" else (" 1018", " 1017")
    return [("It is", -0.1, []), (ours, -0.70, [(theirs, -0.72)])]


def test_a_changed_verdict_comes_with_its_near_tie(tmp_path, box):
    with answering(answer_of) as url:
        grades = graded_with(url, tmp_path, box)
    scores = {score.side: (score.passed, score.judged, score.errors) for score in grades.scores}
    assert scores == {"ar": (3, 3, 0), "tree": (2, 3, 0)}
    (changed,) = grades.changed
    assert changed.problem_id == "sum" and changed.verdicts == ("failed", "passed")
    assert changed.parting.kind == "near-tie" and changed.parting.index == 1
    assert math.isclose(changed.parting.gap_nats, 0.02) and not grades.is_faulty
    assert grades.record.bound_nats == 0.5 and "the tests were shown" in grades.record.note


def test_a_fault_is_told(tmp_path, box):
    def answer(body):
        if body["ddtree"]["mode"] == "tree":
            return [("It is", -0.1, []), (" 3", -0.01, [(" 1018", -4.0)])]
        return [("It is", -0.1, []), (" 1018", -0.01, [(" 3", -4.0)])]

    with answering(answer) as url:
        assert graded_with(url, tmp_path, box).is_faulty


def test_errors_are_no_wrong_answers_and_resume_asks_only_what_is_missing(tmp_path, box):
    def failing(body):
        return (
            None if "half" in body["messages"][-1]["content"] and body["ddtree"]["mode"] == "tree" else answer_of(body)
        )

    with answering(failing) as url:
        grades = graded_with(url, tmp_path, box)
        errors = {score.side: score.errors for score in grades.scores}
        assert errors == {"ar": 0, "tree": 1} and grades.scores[1].judged == 2
        lines = (tmp_path / "answers.jsonl").read_text().splitlines()
        (tmp_path / "answers.jsonl").write_text("\n".join(lines[:3]) + '\n{"torn')

        again = graded_with(url, tmp_path, box, resume=True)
    kept = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    failed_before = sum(json.loads(line)["verdict"] == "error" for line in lines[:3])
    assert len(kept) == 6 + failed_before and len({(row["side"], row["problem_id"]) for row in kept}) == 6
    assert len(again.answers) == 6
    with pytest.raises(UserError, match="holds grades already"), answering(answer_of) as url:
        graded_with(url, tmp_path, box)


def test_an_error_is_asked_again_and_a_server_that_went_ends_the_run(tmp_path, box):
    def failing(body):
        return None if body["ddtree"]["mode"] == "tree" else answer_of(body)

    with answering(failing) as url:
        assert [score.errors for score in graded_with(url, tmp_path, box).scores] == [0, 3]
    with pytest.raises(UserError, match=r"nothing answers|has gone"):
        graded_with(url, tmp_path, box, resume=True)
    with answering(answer_of) as url:
        grades = graded_with(url, tmp_path, box, resume=True)
    assert [(score.errors, score.judged) for score in grades.scores] == [(0, 3), (0, 3)] and len(
        grades.comparisons
    ) == 3


def test_a_server_that_goes_is_no_pile_of_errors(tmp_path, box, monkeypatch):
    """What is left to ask stays unasked, so that a resumed run asks it."""
    from ddtree.bench.grade import run as module

    asked = []

    async def once(*arguments):
        asked.append(arguments)
        return await collect(*arguments) if len(asked) == 1 else Collected(error="refused", is_gone=True)

    monkeypatch.setattr(module, "collect", once)
    with answering(answer_of) as url, pytest.raises(UserError, match="the server has gone"):
        graded_with(url, tmp_path, box)
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 1 and len(asked) == 2


def test_a_server_without_logprobs(tmp_path, box):
    with answering(answer_of, logprobs=False) as url:
        grades = graded_with(url, tmp_path, box)
    kinds = {row.problem_id: row.parting.kind for row in grades.comparisons}
    assert kinds == {"half": "same", "twice": "same", "sum": "unknown"}
