"""``ddtree sweep``: measure many settings of one deployment, and recommend one."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ddtree.bench.sweep.estimate import estimate
from ddtree.bench.sweep.loaded import Sweep, load_sweep
from ddtree.bench.sweep.points import Group
from ddtree.bench.sweep.run import RECOMMENDED, SweepWatcher, run_sweep
from ddtree.bench.sweep.store import SWEEP, PointRow, read_points
from ddtree.cli.bench_progress import BenchProgress
from ddtree.cli.output import note, result_console
from ddtree.errors import UserError
from ddtree.report.choose import chosen_point


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Sweep file (TOML).", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the results.")],
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the points, what is refused or the same, and the time it will take."),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a sweep that was cut off.")] = False,
    no_restore: Annotated[
        bool, typer.Option("--no-restore", help="Leave the last point deployed, not the recommended one.")
    ] = False,
    assume_tok_s: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="N", help="With --dry-run: speed of one user, where nothing is measured yet."),
    ] = None,
) -> None:
    """Apply, verify and measure every point of a sweep file, and deploy the recommended one at the end.

    Everything done is on disk; after a crash --resume goes on. A point that fails, is refused, or is not what it claims
    is recorded as that, and the sweep goes on. Exits 1 where no point could be measured.
    """
    loaded = load_sweep(file)
    if dry_run:
        _tell_plan(loaded, out, assume_tok_s)
        return
    if assume_tok_s is not None:
        raise UserError("--assume-tok-s has no effect on a sweep that runs", "add --dry-run, or leave it out")
    if (out / SWEEP).exists() and not resume:
        raise UserError(f"{out} holds a sweep already", "add --resume to go on, or give another folder")
    try:
        with BenchProgress() as progress:
            rows = run_sweep(
                loaded, out, resume=resume, choose=chosen_point, restore=not no_restore, watcher=_watcher(progress)
            )
    except KeyboardInterrupt:
        note(f"what is done is in {out}; go on with --resume")
        raise
    _tell_rows(rows)
    chosen = chosen_point(out)
    if chosen is not None:
        state = "not deployed" if no_restore else "deployed"
        result_console().print(f"recommended: {chosen.point} ({state})", markup=False, soft_wrap=True)
    note(f"results are in {out}" + ("" if no_restore else f", the recommended deployment in {out / RECOMMENDED}"))
    note(f"for plots and the reason: ddtree report {out}")
    if not any(row.status == "measured" for row in rows):
        raise typer.Exit(1)


def _watcher(progress: BenchProgress) -> SweepWatcher:
    def on_group(number: int, count: int, group: Group) -> None:
        names = ", ".join(point.name.split(": ", 1)[1] for point in group.points)
        progress.print(f"[group {number} of {count}] {group.sweep}: {names}")

    def on_point(row: PointRow) -> None:
        told = row.status if row.status != "same" else f"the same as {row.same_as}"
        progress.print(f"  {row.point}: {told}" + (f": {row.reason}" if row.reason else ""))

    return SweepWatcher(on_group=on_group, on_stage=progress.say_stage, on_point=on_point, bench=progress.watcher())


def _tell_plan(loaded: Sweep, out: Path, tok_s: float | None) -> None:
    done = {row.point: row for row in read_points(out)} if (out / SWEEP).exists() else {}
    groups = {point.name: number for number, group in enumerate(loaded.plan.groups, 1) for point in group.points}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("point", "server", "what happens"):
        table.add_column(name, overflow="fold")
    for point in loaded.plan.points:
        if point.name in done:
            told = f"done: {done[point.name].status}"
        elif point.refused:
            told = f"refused: {point.refused}"
        elif point.same_as:
            told = f"the same as {point.same_as}"
        else:
            told = "measured"
        table.add_row(point.name, str(groups.get(point.name, "-")), told)
    console = result_console()
    console.print(table)
    expected = estimate(loaded, out, tok_s, set(done))
    for number, each in enumerate(expected, 1):
        start = "a start, then " if each.is_restarted else ""
        console.print(
            f"group {number} ({each.group.sweep}): {start}{each.units} units, {each.requests} requests, "
            f"about {_minutes(each.seconds)} by {each.by}",
            markup=False,
            soft_wrap=True,
        )
    for search in loaded.searches:
        left = search.table.trials - len(search.rows(list(done.values())))
        console.print(
            f"search {search.name}: {left} points at most, over {', '.join(search.table.keys)}, by "
            f"{search.table.objective}; not in the time below",
            markup=False,
            soft_wrap=True,
        )
    total = sum(each.seconds for each in expected)
    requests = sum(each.requests for each in expected)
    console.print(f"in all {requests} requests, about {_minutes(total)}", markup=False)


def _tell_rows(rows: list[PointRow]) -> None:
    counts = Counter(row.status for row in rows)
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    result_console().print(f"{len(rows)} points: {told}", markup=False)
    for row in rows:
        if row.status in ("failed", "invalid"):
            print(f"{row.status}: {row.point}: {row.reason}", file=sys.stderr)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
