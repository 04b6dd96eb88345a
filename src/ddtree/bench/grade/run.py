"""A grading run: every answer judged and on disk before it counts, then the sides compared."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ddtree.bench.endpoint import clean_url, connect, make_client
from ddtree.bench.files import append_line, drop_torn_line, locked, whole_lines
from ddtree.bench.grade.collect import Collected, Side, collect
from ddtree.bench.grade.parting import parting
from ddtree.bench.grade.problem import Graded, graded, number_of, program_of
from ddtree.bench.grade.record import GRADE_FILES, AnswerRow, ComparisonRow, GradeRecord
from ddtree.bench.grade.sandbox import Outcome, Sandbox
from ddtree.bench.provenance import PACKAGES
from ddtree.bench.record import SCHEMA, Variant, schema_text
from ddtree.bench.statistics import Estimate, wilson
from ddtree.bench.told import at
from ddtree.bench.workload import Workload
from ddtree.disk import write_whole
from ddtree.errors import UserError
from ddtree.program import commit, versions
from ddtree.verify.forced import EXACT_NATS, NEAR_TIE_NATS

RECORD, ANSWERS, COMPARISONS = "grade.json", "answers.jsonl", "comparisons.jsonl"


@dataclass(frozen=True, kw_only=True)
class GradeOptions:
    """What is graded.

    Attributes:
        sides: name, URL and variant of each side; the first is what the others are held against.
        bound_nats: largest gap of a near-tie; None: half a nat, or a thousandth where every side computes in float32.
    """

    sides: tuple[tuple[str, str, Variant], ...]
    workload: Workload
    folder: Path
    max_tokens: int = 512
    concurrency: int = 1
    timeout_s: float = 600.0
    api_key: str | None = None
    model: str | None = None
    bound_nats: float | None = None
    resume: bool = False


@dataclass(frozen=True)
class Score:
    """Of one side. ``errors``: problems without an answer, which are not in ``pass_at_1``."""

    side: str
    passed: int
    judged: int
    errors: int
    pass_at_1: Estimate | None


@dataclass(frozen=True)
class Grades:
    """All of a run. ``is_faulty``: an answer parted from its reference by more than rounding explains."""

    record: GradeRecord
    answers: list[AnswerRow]
    comparisons: list[ComparisonRow]

    @property
    def scores(self) -> list[Score]:
        found = []
        for side in self.record.sides:
            rows = [row for row in self.answers if row.side == side]
            judged = [row for row in rows if row.verdict != "error"]
            passed = sum(row.verdict == "passed" for row in judged)
            found.append(Score(side, passed, len(judged), len(rows) - len(judged), wilson(passed, len(judged))))
        return found

    @property
    def is_faulty(self) -> bool:
        return any(row.parting.kind == "fault" for row in self.comparisons)

    @property
    def changed(self) -> list[ComparisonRow]:
        return [row for row in self.comparisons if row.verdict_changed]


def run_grade(
    options: GradeOptions, sandbox: Sandbox, on_answer: Callable[[int, int, AnswerRow], None] = lambda i, n, row: None
) -> Grades:
    """Grade what is not graded yet, and compare.

    Args:
        on_answer: told how many are done, of how many, and the newest.

    Raises:
        UserError: a server or a problem will not do, or the folder holds another run.
    """
    with locked(options.folder):
        return asyncio.run(_run(options, sandbox, on_answer))


def judge(problem: Graded, answer: str, sandbox: Sandbox) -> Outcome:
    """Whether ``answer`` is right."""
    if problem.kind == "program":
        return sandbox.run(program_of(problem, answer))
    found = number_of(answer)
    is_right = found is not None and found == problem.number
    return Outcome("passed" if is_right else "failed", f"{found} for {problem.number}", 0.0)


def judge_references(workload: Workload, sandbox: Sandbox) -> list[tuple[str, Outcome]]:
    """Run each problem's own solution: whatever fails here cannot be held against a model."""
    problems, _ = graded(workload)
    known = [problem for problem in problems if problem.reference is not None]
    if not known:
        raise UserError(f"{workload.name} has no solutions of its own", "a line needs canonical_solution or code")
    return [(problem.id, sandbox.run(f"{problem.reference}\n\n{problem.tests}\n")) for problem in known]


def read_grades(folder: Path) -> Grades:
    """A grading run from its folder."""
    try:
        record = GradeRecord.model_validate_json((folder / RECORD).read_text(encoding="utf-8"))
        rows = [AnswerRow.model_validate_json(line) for line in whole_lines(folder / ANSWERS)]
        comparisons = [ComparisonRow.model_validate_json(line) for line in whole_lines(folder / COMPARISONS)]
    except OSError as error:
        raise UserError(f"cannot read {folder / RECORD} ({error.strerror})", "give a folder of ddtree grade") from error
    except ValidationError as error:
        raise UserError(f"{folder} is not of this version", "use the ddtree that wrote it") from error
    answers = {(row.side, row.problem_id): row for row in rows}  # an error may be followed by an answer
    return Grades(record, list(answers.values()), comparisons)


async def _run(options: GradeOptions, sandbox: Sandbox, on_answer: Callable[[int, int, AnswerRow], None]) -> Grades:
    problems, remark = graded(options.workload)
    async with AsyncExitStack() as clients:
        sides = []
        for name, url, variant in options.sides:
            client = await clients.enter_async_context(make_client(clean_url(url), options.api_key))
            endpoint = await connect(clean_url(url), client, options.model)
            if variant.mode != "server" and endpoint.engine != "native":
                raise UserError(
                    f"variant {variant.name} is set per request, which only ddtree's own server honours",
                    "give a second server with --against instead",
                )
            sides.append(Side(name, endpoint, variant))
        record = _record(options, sides, sandbox, remark)
        record = _begin(options, record)
        answers = read_grades(options.folder).answers
        write_whole(options.folder / SCHEMA, schema_text(GRADE_FILES))
        done = {(row.side, row.problem_id) for row in answers if row.verdict != "error"}
        todo = deque((side, problem) for problem in problems for side in sides if (side.name, problem.id) not in done)
        total, finished = len(problems) * len(sides), len(done)

        gone: list[str] = []

        async def slot() -> None:
            nonlocal finished
            while todo:
                side, problem = todo.popleft()
                collected = await collect(side, problem.turn, options.max_tokens, options.timeout_s)
                if collected.is_gone:
                    todo.clear()
                    gone.append(f"{side.name}: the server has gone ({collected.error})")
                    return
                row = await asyncio.to_thread(_row, record, side, problem, collected, sandbox)
                append_line(options.folder / ANSWERS, row.model_dump_json())
                finished += 1
                on_answer(finished, total, row)

        async with asyncio.TaskGroup() as slots:
            for _ in range(options.concurrency):
                slots.create_task(slot())
    if gone:
        raise UserError(gone[0], "start it again and add --resume: what is done is kept")
    grades = read_grades(options.folder)
    comparisons = _compare(grades.record, grades.answers, problems)
    write_whole(options.folder / COMPARISONS, "".join(row.model_dump_json() + "\n" for row in comparisons))
    return Grades(grades.record, grades.answers, comparisons)


def _begin(options: GradeOptions, record: GradeRecord) -> GradeRecord:
    path = options.folder / RECORD
    if not path.exists():
        write_whole(path, record.model_dump_json(indent=2))
        return record
    if not options.resume:
        raise UserError(f"{options.folder} holds grades already", "add --resume to go on, or give another folder")
    found = read_grades(options.folder).record
    for name in ("workload", "max_tokens", "bound_nats", "isolation"):
        if getattr(found, name) != getattr(record, name):
            raise UserError(f"{options.folder} was graded with another {name}", "give another folder")
    if list(found.sides) != list(record.sides):
        raise UserError(f"{options.folder} has the sides {', '.join(found.sides)}", "give another folder")
    drop_torn_line(options.folder / ANSWERS)
    return found


def _record(options: GradeOptions, sides: Sequence[Side], sandbox: Sandbox, remark: str | None) -> GradeRecord:
    bound = options.bound_nats
    if bound is None:
        is_exact = all(_dtype(side) == "float32" for side in sides)
        bound = EXACT_NATS if is_exact else NEAR_TIE_NATS
    return GradeRecord(
        run_id=uuid.uuid4().hex[:12],
        created_at=time.time(),
        command=["ddtree", *sys.argv[1:]],
        versions=versions(PACKAGES),
        commit=commit(),
        workload=options.workload.record(),
        sides={
            side.name: {
                "url": side.endpoint.url,
                "engine": side.endpoint.engine,
                "model": side.endpoint.model,
                "variant": side.variant.name,
                "facts": side.endpoint.facts,
            }
            for side in sides
        },
        max_tokens=options.max_tokens,
        isolation=sandbox.isolation,
        bound_nats=bound,
        note=remark,
    )


def _dtype(side: Side) -> str | None:
    found = at(side.endpoint.facts, "/server_info", "effective", "engine", "dtype")
    return found if isinstance(found, str) else None


def _row(record: GradeRecord, side: Side, problem: Graded, collected: Collected, sandbox: Sandbox) -> AnswerRow:
    outcome = None if collected.error else judge(problem, collected.text, sandbox)
    return AnswerRow(
        run_id=record.run_id,
        side=side.name,
        problem_id=problem.id,
        verdict="error" if outcome is None else outcome.how,
        detail=collected.error if outcome is None else outcome.detail,
        text=collected.text or None,
        finish_reason=collected.finish_reason,
        completion_tokens=collected.completion_tokens,
        tau=collected.tau,
        chances=collected.chances,
    )


def _compare(record: GradeRecord, answers: Sequence[AnswerRow], problems: Sequence[Graded]) -> list[ComparisonRow]:
    found = {(row.side, row.problem_id): row for row in answers}
    first, *others = record.sides
    rows = []
    for side in others:
        for problem in problems:
            ours, theirs = found.get((side, problem.id)), found.get((first, problem.id))
            if ours is None or theirs is None or "error" in (ours.verdict, theirs.verdict):
                continue
            rows.append(
                ComparisonRow(
                    run_id=record.run_id,
                    problem_id=problem.id,
                    side=side,
                    against=first,
                    verdicts=(ours.verdict, theirs.verdict),
                    verdict_changed=(ours.verdict == "passed") != (theirs.verdict == "passed"),
                    parting=parting(
                        ours.chances, theirs.chances, (ours.text or "", theirs.text or ""), record.bound_nats
                    ),
                )
            )
    return rows
