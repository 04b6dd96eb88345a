"""A verdict as a table for people."""

from __future__ import annotations

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ddtree.plain_text import printable
from ddtree.verify.finding import Finding, Status, Verdict

_MARKS = {Status.proven: "[green]proven[/]", Status.violated: "[red]VIOLATED[/]", Status.unknown: "[yellow]unknown[/]"}
_WORDS = {
    Status.proven: "proven: the evidence shows every claim",
    Status.violated: "VIOLATED: the evidence contradicts a claim",
    Status.unknown: "could not be checked in full",
}


def table(verdict: Verdict, *, is_verbose: bool) -> RenderableType:
    """One row a claim; evidence of what is proven only where it is asked for."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "claim", "evidence"):
        grid.add_column(title, overflow="fold", vertical="top")
    for finding in verdict.findings:
        mark = _MARKS[finding.status]
        if finding.status is Status.unknown and not finding.is_required and not verdict.is_strict:
            mark = "[dim]unknown[/]"
        grid.add_row(mark, escape(printable(finding.claim)), _evidence(finding, is_verbose))
    return grid


def _evidence(finding: Finding, is_verbose: bool) -> Text:
    lines = list(finding.evidence)
    if finding.status is Status.proven and not is_verbose:
        lines = lines[:1]
    text = Text(printable("\n".join(lines)))
    if finding.remedy and finding.status is not Status.proven:
        text.append(("\n" if lines else "") + f"-> {finding.remedy}", style="bold")
    return text


def summary(verdict: Verdict) -> str:
    """One line."""
    counts = {status: sum(each.status is status for each in verdict.findings) for status in Status}
    told = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    engine = f" ({verdict.engine})" if verdict.engine else ""
    return f"{verdict.target}{engine}: {_WORDS[verdict.status]}. {told}; {verdict.seconds:.0f} s"
