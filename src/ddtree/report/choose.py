"""The point of a sweep that its results recommend."""

from __future__ import annotations

from pathlib import Path

from ddtree.bench.result_folder import RUN, read_run
from ddtree.bench.sweep.store import PointRow, read_points
from ddtree.report.configuration import configuration_of
from ddtree.report.recommend import recommend
from ddtree.report.results import read_results


def chosen_point(folder: Path) -> PointRow | None:
    """The measured point whose configuration is recommended; None where there is none."""
    measured = [row for row in read_points(folder) if row.status == "measured" and row.folder]
    if not measured:
        return None
    wanted = recommend(read_results([folder]))[0].configuration
    for row in measured:
        place = folder / str(row.folder)
        if (place / RUN).exists() and configuration_of(read_run(place), row.variant) == wanted:
            return row
    return None
