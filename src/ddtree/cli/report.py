"""``ddtree report``: findings from results, and the check against a baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree.cli.output import note, result_console
from ddtree.errors import UserError
from ddtree.report.compare import is_regression
from ddtree.report.recommend import Recommendation
from ddtree.report.write import ReportOptions, write_report


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Results of bench, sweep or grade.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the report. Default: DIR/report.")] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", help="Heading.")] = "Findings",
    baseline: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Results to compare with; may be given several times.")
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(metavar="SHARE", help="With --baseline: a larger loss is a regression. 0.05: five per cent."),
    ] = 0.05,
    target_gb: Annotated[
        float | None,
        typer.Option(metavar="GB", help="Weights of the target in 10^9 bytes: tells the share of the bound."),
    ] = None,
    drafter_gb: Annotated[
        float | None, typer.Option(metavar="GB", help="Weights of the drafter, its head included.")
    ] = None,
    bandwidth_gb_s: Annotated[
        float | None, typer.Option(metavar="GB/S", help="Memory bandwidth. Default: the GPU's data sheet.")
    ] = None,
    no_plots: Annotated[bool, typer.Option("--no-plots", help="Text and tables alone; needs no matplotlib.")] = False,
) -> None:
    """Write a findings report: findings.md, and findings.html as a single file.

    With --baseline it compares, and exits 1 where something became slower by more than --threshold and by more than
    chance explains, or is missing.
    """
    if not 0 < threshold < 1:
        raise UserError(f"--threshold is {threshold:g}", "give a share between 0 and 1")
    for flag, value in {
        "--target-gb": target_gb,
        "--drafter-gb": drafter_gb,
        "--bandwidth-gb-s": bandwidth_gb_s,
    }.items():
        if value is not None and value <= 0:
            raise UserError(f"{flag} is {value:g}", "give a positive number")
        if value is not None and target_gb is None:
            raise UserError(f"{flag} has no meaning without --target-gb", "add it, or leave both out")
    options = ReportOptions(
        folders=tuple(folders),
        out=out if out is not None else folders[0] / "report",
        title=title,
        baseline=tuple(baseline or ()),
        threshold=threshold,
        target_gb=target_gb,
        drafter_gb=drafter_gb,
        bandwidth_gb_s=bandwidth_gb_s,
        with_plots=not no_plots,
    )
    written = write_report(options)
    console = result_console()
    console.print(_told(written.recommendation), markup=False, soft_wrap=True)
    note(f"the report is in {written.html} and {written.markdown}")
    if written.changes is not None:
        for change in written.changes:
            if change.judgement in ("regression", "lost"):
                ratio = "" if change.ratio is None else f", now / before {change.ratio:.3f}"
                console.print(
                    f"{change.judgement}: {change.quantity} of {change.configuration} at {change.place}{ratio}",
                    markup=False,
                    soft_wrap=True,
                )
        if is_regression(written.changes):
            raise typer.Exit(1)
        console.print(f"no regression beyond {threshold:.0%}", markup=False)


def _told(recommendation: Recommendation) -> str:
    if recommendation.configuration is None:
        return f"recommended: none, {recommendation.reason}"
    return f"recommended: {recommendation.configuration.name}; {recommendation.reason}"
