"""What ``ddtree kit`` tells of a kit that was made, checked or restored."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ddtree.cli.output import note, print_json, result_console

if TYPE_CHECKING:
    from ddtree.kit.check_result import CheckResult
    from ddtree.kit.record import KitRecord
    from ddtree.kit.restore import Restored
    from ddtree.kit.step import Step


def tell_made(made: KitRecord, place: Path, commit: str | None, as_json: bool) -> None:
    if as_json:
        print_json(made.model_dump(mode="json") | {"verdict": made.verdict, "place": str(place), "commit": commit})
        return
    console = result_console()
    n = len(made.experiments)
    told = f"{place}: verdict {made.verdict}, {n} measured configuration{'s' if n != 1 else ''}"
    if made.masked:
        told += f", {sum(each.times for each in made.masked)} secrets masked"
    console.print(told, markup=False, soft_wrap=True)
    for one in made.places:
        for line in one.notes:
            note(f"{one.name}: {line}")
    for each in made.masked:
        note(f"masked in {each.file}: {each.kind}" + (f", {each.times} times" if each.times > 1 else ""))
    if made.even_if_failing:
        note("sealed although not every service is proven: the kit says so")
    if commit:
        note(f"committed as {commit[:12]}")


def tell_check(kit: Path, found: CheckResult) -> None:
    console = result_console()
    for fault in found.faults:
        console.print(fault, markup=False, soft_wrap=True)
    for each in found.signatures:
        who = each.signer or ("not known who" if not each.trouble else each.trouble)
        console.print(f"signed by {each.fingerprint} ({who})", markup=False, soft_wrap=True)
    for line in found.unchecked:
        print(f"not checked: {line}", file=sys.stderr)
    verdict = f"; verdict when it was sealed: {found.kit.verdict}" if found.kit else ""
    words = f"whole{verdict}" if found.is_whole else f"NOT whole: {len(found.faults)} faults"
    size = f"{found.total_bytes / 1e6:.2f} MB"
    console.print(f"{kit} is {words} ({found.files} files, {size})", markup=False, soft_wrap=True)


_MARKS = {"done": "[green]done[/]", "to do": "to do", "refused": "[red]REFUSED[/]", "unknown": "[yellow]note[/]"}


def tell_steps(steps: tuple[Step, ...], as_json: bool) -> None:
    if as_json:
        print_json({"steps": [vars(step) for step in steps]})
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold", vertical="top")
    for step in steps:
        table.add_row(step.name, _MARKS[step.state], escape(step.told))
    result_console().print(table)


def tell_restored(done: Restored, as_json: bool) -> None:
    if as_json:
        print_json(done.to_json())
        return
    console = result_console()
    console.print(f"verdict: {done.verdict.status.value} (sealed: {done.sealed_verdict})", markup=False)
    for each in done.verdict.findings:
        if each.status.value == "violated":
            console.print(f"violated: {each.claim}: {'; '.join(each.evidence)}", markup=False, soft_wrap=True)
    told = done.comparison.told() if done.comparison else f"nothing measured: {done.no_canary}"
    console.print(f"canary: {told}", markup=False, soft_wrap=True)
    words = "the service is as it was sealed" if done.is_as_sealed else "the service is NOT as it was sealed"
    console.print(f"{words} ({time.strftime('%Y-%m-%d %H:%M:%S')})", markup=False)
