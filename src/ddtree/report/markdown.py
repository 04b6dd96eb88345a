"""Markdown as the report writes it: tables whose cells stay text, numbers with their intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddtree.bench.statistics import Estimate


def told_estimate(estimate: Estimate | None, spec: str) -> str:
    """A value and its interval, or a dash."""
    return "-" if estimate is None else f"{estimate:{spec}}"


def told_number(value: float | None, spec: str = ".3g") -> str:
    """A number, or a dash."""
    return "-" if value is None else f"{value:{spec}}"


def table(names: Iterable[str], rows: Iterable[Sequence[str]], alignment: str) -> str:
    """A Markdown table; no bar in a cell splits it, and nothing in it is an image, which a reader would load."""
    rule = "|".join(" ---: " if side == "r" else " --- " for side in alignment)
    lines = [f"| {' | '.join(names)} |", f"|{rule}|"]
    for row in rows:
        cells = (str(cell).replace("|", "\\|").replace("\n", " ").replace("![", "!\\[") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
