"""What every plot has in common: an SVG with a name, one style, and the shapes that are drawn more than once."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ddtree.bench.statistics import Estimate
from ddtree.errors import UserError

COLOURS = ("#0b6e99", "#c8553d", "#4f7942", "#8e5ea2", "#b8860b", "#5a6a78", "#2a9d8f", "#9d4e6f")
MODE_COLOURS = {"ar": "#5a6a78", "chain": "#c8553d", "tree": "#0b6e99", "server": "#8e5ea2"}
INK, FAINT = "#22303c", "#5a6a78"
_WIDTH = 8.2
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9aa7b2",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dde3e8",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "ddtree",  # else ids, and so whole files, differ from run to run
    "svg.fonttype": "path",
    "figure.facecolor": "white",
}


@dataclass(frozen=True)
class Drawing:
    """An SVG with its name (of a file, without ending) and a caption."""

    name: str
    title: str
    caption: str
    svg: str


@contextmanager
def house_style() -> Iterator[None]:
    """Draw within it.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need ddtree[report]", "pip install 'ddtree[report]', or give --no-plots") from None
    matplotlib.use("svg")
    style: Any = _STYLE
    with matplotlib.rc_context(style):
        yield


def canvas_of(height: float, width: float = _WIDTH) -> tuple[Any, Any]:
    """A figure with one pair of axes, in inches."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(width, height), layout="constrained")
    return canvas, canvas.subplots()


def panels_of(count: int) -> tuple[Any, list[Any]]:
    """A figure with axes side by side that share their scale upwards."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(_WIDTH, 3.8), layout="constrained")
    return canvas, list(canvas.subplots(1, count, squeeze=False, sharey=True)[0])


def grid_of(count: int, height: float, across: int = 3) -> tuple[Any, list[Any]]:
    """A figure with ``count`` axes in lines of ``across``, each line ``height`` inches high."""
    from matplotlib.figure import Figure

    lines = -(-count // across)
    across = min(across, count)
    canvas = Figure(figsize=(_WIDTH if across > 1 else _WIDTH / 2, height * lines), layout="constrained")
    panels = list(canvas.subplots(lines, across, squeeze=False).flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    return canvas, panels[:count]


def short(value: float) -> str:
    """Three digits or more, never with an exponent; whole numbers as they are."""
    return (
        f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    )


def heat(axes: Any, grid: list[list[float]], columns: list[str], lines: list[str], most: float | None = None) -> None:
    """Numbers in boxes, the larger the darker, ``most`` the darkest; NaN and what rounds to 0 are left empty."""
    mesh = axes.pcolormesh(grid, cmap="Blues", vmin=0, vmax=most, edgecolors="white", linewidth=1.5)
    axes.invert_yaxis()
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            if value != value or value < 0.005:
                continue
            shade = "white" if mesh.norm(value) > 0.55 else INK
            axes.text(x + 0.5, y + 0.5, short(value), ha="center", va="center", color=shade, fontsize=9)
    axes.set_xticks([place + 0.5 for place in range(len(columns))], columns)
    axes.set_yticks([place + 0.5 for place in range(len(lines))], lines)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def legend(canvas: Any, panels: Sequence[Any]) -> None:
    """One for all panels, below them; none where it would have one entry."""
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if len(entries) > 1:
        canvas.legend(
            list(entries.values()), list(entries), loc="outside lower center", ncols=min(4, len(entries)), fontsize=8.5
        )


def finished(canvas: Any, name: str, title: str, caption: str) -> Drawing:
    """The SVG alone, without the head that only a file of its own needs."""
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)
    return Drawing(safe, title, caption, svg[svg.index("<svg") :])


def curve(axes: Any, places: Sequence[float], found: Sequence[Estimate], colour: str, label: str) -> None:
    """A line through values, with their intervals as whiskers."""
    axes.errorbar(
        places,
        [each.value for each in found],
        yerr=spread(found),
        marker="o",
        markersize=5,
        linewidth=1.8,
        capsize=3,
        color=colour,
        label=label,
    )


def spread(found: Sequence[Estimate]) -> list[list[float]]:
    """Distances of the interval's ends, as matplotlib wants them."""
    below = [max(0.0, each.value - each.low) for each in found]
    return [below, [max(0.0, each.high - each.value) for each in found]]


def cycle() -> Iterator[str]:
    """Colours without end."""
    while True:
        yield from COLOURS
