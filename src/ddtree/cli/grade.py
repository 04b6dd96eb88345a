"""``ddtree grade``: whether answers are right, with and without speculation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ddtree.bench.endpoint import clean_url
from ddtree.bench.grade.record import AnswerRow
from ddtree.bench.grade.run import GradeOptions, Grades, judge_references, run_grade
from ddtree.bench.grade.sandbox import Limits, Sandbox, find_sandbox
from ddtree.bench.plan import parse_variant
from ddtree.bench.record import Variant
from ddtree.bench.workload import Workload, read_workload
from ddtree.cli.bench import read_key
from ddtree.cli.output import ProgressLine, note, result_console
from ddtree.errors import UserError


def grade(
    problems: Annotated[
        str,
        typer.Option(
            metavar="[NAME=]FILE|hub:NAME",
            help="JSONL with turns and either test and entry_point (HumanEval), test_list (MBPP) or answer (GSM8K).",
        ),
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the grades.")] = None,
    base_url: Annotated[str, typer.Option(metavar="URL", help="The server.")] = "http://127.0.0.1:8000",
    variant: Annotated[
        str,
        typer.Option(metavar="V,...", help="Sides on ddtree's own server; the others are held against the first."),
    ] = "ar,tree",
    against: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Instead of variants: a second server, such as one without speculation."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Grade the first N problems.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Longest answer.")] = 512,
    concurrency: Annotated[int, typer.Option(min=1, metavar="N", help="Requests at the same time.")] = 1,
    time_limit: Annotated[float, typer.Option(min=0.1, metavar="S", help="For each program, in seconds.")] = 10.0,
    memory_limit: Annotated[int, typer.Option(min=64, metavar="MiB", help="For each program.")] = 512,
    near_tie: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="NATS", help="Largest gap that rounding explains. Default: 0.5, float32 0.001."),
    ] = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="Run the problems' own solutions instead of asking a server.")
    ] = False,
    unsafe: Annotated[
        bool,
        typer.Option("--unsafe", help="Run programs without isolation, with limits alone: on a throw-away machine."),
    ] = False,
    request_timeout: Annotated[float, typer.Option(min=0.1, metavar="S", help="Longest answer, in seconds.")] = 600.0,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Its first line is shown as a key.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Where the server has several.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was cut off.")] = False,
) -> None:
    """Grade answers with and without speculation: pass@1, verdicts that changed, and the first token that differs.

    Programs run in a locked-down process; without one nothing is run. Exits 1 where two sides part by more than
    rounding explains, or with --reference where a solution fails.
    """
    workload = read_workload(problems, limit=limit)
    sandbox = find_sandbox(Limits(wall_s=time_limit, memory_mib=memory_limit), unsafe)
    if unsafe:
        note("programs run without isolation")
    if reference:
        _references(workload, sandbox)
        return
    if out is None:
        raise UserError("--out is missing", "name a folder for the grades")
    if against is not None:
        server = parse_variant("server")
        sides: tuple[tuple[str, str, Variant], ...] = (
            ("against", clean_url(against), server),
            ("base", clean_url(base_url), server),
        )
    else:
        variants = [parse_variant(part.strip()) for part in variant.split(",")]
        if len({each.name for each in variants}) < len(variants):
            raise UserError(f"--variant is {variant!r}", "name each variant once")
        sides = tuple((each.name, clean_url(base_url), each) for each in variants)
    options = GradeOptions(
        sides=sides,
        workload=workload,
        folder=out,
        max_tokens=max_tokens,
        concurrency=concurrency,
        timeout_s=request_timeout,
        api_key=read_key(api_key_file),
        model=model,
        bound_nats=near_tie,
        resume=resume,
    )
    try:
        with ProgressLine() as progress:

            def told(done: int, total: int, row: AnswerRow) -> None:
                progress("grading", done / total)

            grades = run_grade(options, sandbox, told)
    except KeyboardInterrupt:
        note(f"what is done is in {out}; go on with --resume")
        raise
    show_grades(grades)
    if grades.is_faulty:
        raise typer.Exit(1)


def show_grades(grades: Grades) -> None:
    """Scores, and what became of the answers' equality."""
    console = result_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("side", "pass@1", "95 % interval", "passed", "no answer"):
        table.add_column(name, justify="left" if name == "side" else "right")
    for score in grades.scores:
        share = score.pass_at_1
        table.add_row(
            score.side,
            "-" if share is None else f"{share.value:.1%}",
            "-" if share is None else f"{share.low:.1%} to {share.high:.1%}",
            f"{score.passed} of {score.judged}",
            str(score.errors),
        )
    console.print(table)
    for side in list(grades.record.sides)[1:]:
        rows = [row for row in grades.comparisons if row.side == side]
        kinds = Counter(row.parting.kind for row in rows)
        told = ", ".join(f"{kinds[kind]} {kind}" for kind in ("same", "near-tie", "fault", "unknown") if kinds[kind])
        changed = [row for row in rows if row.verdict_changed]
        console.print(
            f"{side} against {rows[0].against if rows else '-'}: {told or 'nothing to compare'}; "
            f"{len(changed)} verdicts changed",
            markup=False,
        )
        for row in rows:
            if row.verdict_changed or row.parting.kind in ("fault", "unknown"):
                gap = "" if row.parting.gap_nats is None else f", gap {row.parting.gap_nats:.4f} nats"
                console.print(
                    f"  {row.problem_id}: {row.verdicts[1]} -> {row.verdicts[0]}; {row.parting.kind} at token "
                    f"{row.parting.index}{gap}: {row.parting.detail}",
                    markup=False,
                )
    if grades.record.note:
        console.print(f"note: {grades.record.note}", markup=False)
    console.print(f"isolation: {grades.record.isolation}", markup=False)


def _references(workload: Workload, sandbox: Sandbox) -> None:
    console = result_console()
    outcomes = judge_references(workload, sandbox)
    failed = [(name, outcome) for name, outcome in outcomes if outcome.how != "passed"]
    for name, outcome in failed:
        console.print(f"{name}: {outcome.how}: {outcome.detail}", markup=False)
    console.print(f"{len(outcomes) - len(failed)} of {len(outcomes)} solutions pass", markup=False)
    if failed:
        raise typer.Exit(1)
