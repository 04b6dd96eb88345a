"""Puts a report together and on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree.disk import write_whole
from ddtree.errors import UserError
from ddtree.report.compare import Change, compare
from ddtree.report.figures import drawings
from ddtree.report.findings import findings
from ddtree.report.page import page
from ddtree.report.recommend import Recommendation, recommend
from ddtree.report.results import ResultSet, read_results
from ddtree.report.roofline import Machine, known_bandwidth, shares


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What goes into a report.

    Attributes:
        baseline: results to compare with, within ``threshold`` (0.05: five per cent).
        target_gb, drafter_gb: bytes of weights, in 10^9; for the fraction of the bound.
        bandwidth_gb_s: None: by the GPU's data sheet, where the results name one.
    """

    folders: tuple[Path, ...]
    out: Path
    title: str = "Findings"
    baseline: tuple[Path, ...] = ()
    threshold: float = 0.05
    target_gb: float | None = None
    drafter_gb: float | None = None
    bandwidth_gb_s: float | None = None
    with_plots: bool = True


@dataclass(frozen=True)
class Written:
    """The report's files, and what they say in short."""

    markdown: Path
    html: Path
    recommendation: Recommendation
    changes: list[Change] | None


def write_report(options: ReportOptions) -> Written:
    """Read results and write ``findings.md``, ``findings.html`` and ``figures/``."""
    results = read_results(options.folders)
    changes = None
    if options.baseline:
        changes = compare(read_results(options.baseline), results, options.threshold)
    recommendations = recommend(results)
    plots = drawings(results) if options.with_plots else []
    machine = _machine(options, results)
    roofline = (machine, shares(results, machine)) if machine else None
    text = findings(options.title, results, recommendations, plots, roofline, changes, options.threshold)
    try:
        (options.out / "figures").mkdir(parents=True, exist_ok=True)
        for plot in plots:
            write_whole(options.out / "figures" / f"{plot.name}.svg", plot.svg)
        written = Written(options.out / "findings.md", options.out / "findings.html", recommendations[0], changes)
        write_whole(written.markdown, text)
        write_whole(written.html, page(options.title, text, plots))
    except OSError as error:
        raise UserError(f"cannot write to {options.out} ({error.strerror})", "give another --out") from error
    return written


def _machine(options: ReportOptions, results: ResultSet) -> Machine | None:
    if options.target_gb is None:
        return None
    found: Sequence[object] | None
    if options.bandwidth_gb_s is not None:
        found = (options.bandwidth_gb_s, "as given")
    else:
        found = known_bandwidth(results)
    if found is None:
        return None
    return Machine(float(str(found[0])), str(found[1]), options.target_gb, options.drafter_gb or 0.0)
