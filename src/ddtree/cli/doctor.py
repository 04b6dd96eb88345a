"""``ddtree doctor``: what speaks against a start, before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ddtree.cli.output import ProgressLine, note, print_json, result_console
from ddtree.doctor import Checkup, Condition, Grade, Needs, examine, read_recording, take_recording
from ddtree.doctor.needs import has_experts, needs_of_deployment, weights_of
from ddtree.doctor.recording import write_recording
from ddtree.errors import UserError

EXIT_FAULTS = 1
_MARKS = {
    Grade.good: "[green]good[/]",
    Grade.hint: "[yellow]hint[/]",
    Grade.fault: "[red]FAULT[/]",
    Grade.unknown: "[dim]unknown[/]",
}


def doctor(
    deployment: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Deployment file (.toml) that is to be started here.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Interpreter of the engine. Default: the deployment's, or this.")
    ] = None,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Model folder that is to be served.")] = None,
    model_gb: Annotated[
        float | None, typer.Option(min=0.001, metavar="GB", help="Size of weights that are still to be fetched.")
    ] = None,
    disk: Annotated[Path | None, typer.Option(metavar="DIR", help="Where weights are to be.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port that is to be listened on.")] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also keep the raw words of this machine's commands.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Judge words that were kept, perhaps of another machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all conditions as one JSON object.")] = False,
) -> None:
    """Look at GPUs, builds, topology and host before anything is started. Nothing is changed.

    Exit code 1: a start would fail. 0: it would not, as far as can be told.
    """
    if replay is not None and (python or record or disk):
        raise UserError("--replay asks this machine nothing", "leave --python, --record and --disk out")
    if model is not None and model_gb is not None:
        raise UserError("--model and --model-gb both tell the size", "leave one of them out")
    needs, own_python = _needs(deployment, model, model_gb)
    if port is not None:
        needs = replace(needs, port=port)
    if replay is not None:
        recording = read_recording(replay)
    else:
        with ProgressLine() as progress:
            progress("asking this machine", 0.0)
            recording = take_recording(python or own_python, disk or model)
        if record is not None:
            write_recording(record, recording)
            note(f"the raw words are in {record}")
    checkup = examine(recording, needs)
    if as_json:
        print_json(checkup.to_json())
    else:
        _print(checkup)
    if checkup.has_faults:
        raise typer.Exit(EXIT_FAULTS)


def _needs(file: Path | None, model: Path | None, model_gb: float | None) -> tuple[Needs, str | None]:
    """What is to be started, and the engine's interpreter where a deployment names it."""
    if file is None:
        if model is not None:
            return Needs(weights_of(model), is_fetched=True, has_experts=has_experts(model)), None
        return Needs(weights_bytes=int(model_gb * 1e9) if model_gb else None), None
    if model is not None:
        raise UserError("--model beside a deployment file, which names its model", "leave it out")
    from ddtree.deploy.deployment import load_deployment

    deployment = load_deployment(file)
    if deployment.host.kind != "local":
        raise UserError(
            f"{file} is for {deployment.host.address}, and doctor looks at this machine",
            "run it there, or bring its words here with --record and --replay",
        )
    needs = needs_of_deployment(deployment)
    if model_gb is not None and needs.weights_bytes is None:
        needs = replace(needs, weights_bytes=int(model_gb * 1e9))
    venv = deployment.engine.venv
    return needs, f"{venv}/bin/python" if venv else None


def _print(checkup: Checkup) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold", vertical="top")
    for condition in checkup.conditions:
        table.add_row(_MARKS[condition.grade], _words(condition))
    console = result_console()
    console.print(table)
    counts = {grade: sum(each.grade is grade for each in checkup.conditions) for grade in Grade}
    told = ", ".join(f"{count} {escape(grade.value)}" for grade, count in counts.items() if count)
    console.print(f"{'a start would fail' if checkup.has_faults else 'nothing speaks against a start'}: {told}")


def _words(condition: Condition) -> Text:
    text = Text(condition.what)
    if condition.evidence:
        text.append(f"\n{condition.evidence}", style="dim")
    if condition.remedy and condition.grade is not Grade.good:
        text.append(f"\n-> {condition.remedy}", style="bold")
    return text
