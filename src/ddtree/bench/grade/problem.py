"""What can be graded: which kind a line is, what the model is asked, and what decides whether it is right."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from ddtree.bench.workload import Problem, Workload
from ddtree.errors import UserError

Kind = Literal["program", "number"]
_FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")


@dataclass(frozen=True)
class Graded:
    """A problem with what decides over an answer.

    Attributes:
        turn: what the model is asked.
        entry_point: the function that the tests call, where it is named.
        preamble: what stands before that function: imports and helpers.
        continues: the text that a bare continuation completes.
        tests: program that raises where the answer is wrong.
        number: the right final number.
        reference: a solution that is known to be right.
    """

    id: str
    kind: Kind
    turn: str
    entry_point: str = ""
    preamble: str = ""
    continues: str = ""
    tests: str = ""
    number: str = ""
    reference: str | None = None


def graded(workload: Workload) -> tuple[list[Graded], str | None]:
    """The workload's problems, and a remark on how they are asked that belongs next to the score.

    A line with ``test`` and ``entry_point`` (HumanEval), or with ``test_list`` (MBPP), is graded by running the tests;
    one with ``answer`` (GSM8K) by its final number.
    """
    problems = [_graded(problem) for problem in workload.problems]
    if any("test_list" in problem.fields for problem in workload.problems):
        return problems, "the tests were shown with each problem, since its text does not name the function"
    return problems, None


def program_of(problem: Graded, answer: str) -> str:
    """The program that the sandbox runs: what the answer says, then the tests."""
    blocks = _FENCE.findall(answer)
    defining = [block for block in blocks if _defines(block, problem.entry_point)]
    if defining:
        code = defining[0]
    elif blocks:
        code = "\n".join(blocks)
    else:
        code = answer
    if problem.continues and not _defines(code, problem.entry_point):
        solution = problem.continues + _indented(code)
    else:
        solution = f"{problem.preamble}\n{code}"
    return f"{solution}\n\n{problem.tests}\n"


def number_of(answer: str) -> str | None:
    """The final number of an answer: the last ``\\boxed{}``, else after ``####``, else the last number; normalised."""
    boxed = _BOXED.findall(answer)
    told = boxed[-1] if boxed else answer.rsplit("####", 1)[-1]
    numbers = _NUMBER.findall(told)
    if not numbers:
        return None
    return normal(numbers[-1])


def normal(number: str) -> str:
    """Without signs of money and thousands, and ``18.00`` as ``18``."""
    plain = number.replace(",", "").replace("$", "").strip()
    if "." in plain:
        plain = plain.rstrip("0").rstrip(".")
    return plain or "0"


def _graded(problem: Problem) -> Graded:
    fields = problem.fields
    if "test" in fields and "entry_point" in fields:
        return _function(problem, fields)
    if "test_list" in fields:
        return _snippets(problem, fields)
    if "answer" in fields:
        told = str(fields["answer"]).rsplit("####", 1)[-1].strip()
        if not _NUMBER.fullmatch(told):
            raise UserError(
                f"{problem.id}: its answer {told[:40]!r} is no plain number", "formulas are not graded: take them out"
            )
        return Graded(problem.id, "number", problem.turns[0], number=normal(told))
    raise UserError(
        f"{problem.id} cannot be graded", "a line needs test and entry_point, or test_list, or answer, beside its turns"
    )


def _function(problem: Problem, fields: dict[str, Any]) -> Graded:
    entry_point, prompt = str(fields["entry_point"]), str(fields.get("prompt", ""))
    if not entry_point.isidentifier():
        raise UserError(f"{problem.id}: entry_point is {entry_point!r}", "name a function")
    start = prompt.find(f"def {entry_point}")
    reference = fields.get("canonical_solution")
    return Graded(
        problem.id,
        "program",
        problem.turns[0],
        entry_point=entry_point,
        preamble=prompt[:start] if start > 0 else "",
        continues=prompt,
        tests=f"{fields['test']}\n\ncheck({entry_point})",
        reference=None if reference is None else prompt + str(reference),
    )


def _snippets(problem: Problem, fields: dict[str, Any]) -> Graded:
    tests = "\n".join(map(str, [*(fields.get("test_imports") or []), *fields["test_list"]]))
    shown = "\n".join(map(str, fields["test_list"]))
    reference = fields.get("code")
    return Graded(
        problem.id,
        "program",
        f"{problem.turns[0]}\nWrite it in Python. It must pass these tests:\n```python\n{shown}\n```",
        tests=tests,
        reference=None if reference is None else str(reference),
    )


def _defines(code: str, entry_point: str) -> bool:
    return bool(entry_point) and re.search(rf"^\s*(?:async\s+)?def\s+{entry_point}\b", code, re.MULTILINE) is not None


def _indented(code: str) -> str:
    """A continuation of a function's body, whose first line often comes without its indent."""
    body = code.strip("\n")
    first = body.split("\n", 1)[0]
    return body if first.startswith((" ", "\t")) else f"    {body.lstrip()}"
