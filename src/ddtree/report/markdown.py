"""Markdown as the report writes it: tables whose cells stay text, numbers with their intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddtree.bench.statistics import Estimate


def told_value(value: float | None) -> str:
    """Three digits or more, never with an exponent, or a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def told_estimate(estimate: Estimate | None) -> str:
    """A value and its interval, or a dash."""
    if estimate is None:
        return "-"
    return f"{told_value(estimate.value)} [{told_value(estimate.low)}, {told_value(estimate.high)}]"


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
