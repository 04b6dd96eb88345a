"""The plots of a report. Colours tell modes, and stay apart for readers who see few of them."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree.report.budget_figures import speed_by_budget, tau_by_budget, tau_by_context
from ddtree.report.drawing import (
    COLOURS,
    FAINT,
    INK,
    MODE_COLOURS,
    Drawing,
    canvas_of,
    cycle,
    finished,
    grid_of,
    heat,
    house_style,
    legend,
    short,
    spread,
)
from ddtree.report.results import Measurement, ResultSet
from ddtree.report.selection import ordered, shortest_context, sure, told_length


def drawings(results: ResultSet) -> list[Drawing]:
    """Every plot that the results have data for.

    Raises:
        UserError: matplotlib is not installed.
    """
    with house_style():
        found: list[Drawing | None] = []
        for workload in results.workloads:
            rows = results.of(workload)
            found += [
                _modes(workload, rows),
                speed_by_budget(workload, rows),
                tau_by_budget(workload, rows),
                tau_by_context(workload, rows),
                _pareto(workload, rows),
                _accepted(workload, rows),
                _heat_maps(workload, rows),
            ]
        return [drawing for drawing in found if drawing is not None]


def _modes(workload: str, rows: Sequence[Measurement]) -> Drawing | None:
    """Bars: every configuration at each concurrency."""
    context = shortest_context(rows)
    rows = [each for each in rows if each.numbers.key.context_tokens == context and each.numbers.total_tok_s]
    configurations = ordered(each.configuration for each in rows)
    if len(configurations) < 2:
        return None
    concurrencies = sorted({each.numbers.key.concurrency for each in rows})
    canvas, axes = canvas_of(height=1.4 + 0.26 * len(configurations) * len(concurrencies) + 0.35 * len(concurrencies))
    ticks, names, place = [], [], 0.0
    for concurrency in concurrencies:
        start = place
        for configuration in configurations:
            each = next(
                (r for r in rows if r.configuration == configuration and r.numbers.key.concurrency == concurrency), None
            )
            if each is None:
                continue
            total = sure(each.numbers.total_tok_s)
            axes.barh(place, total.value, height=0.78, color=MODE_COLOURS.get(configuration.mode, COLOURS[5]))
            axes.errorbar(total.value, place, xerr=spread([total]), fmt="none", ecolor=INK, elinewidth=1.1, capsize=2.5)
            axes.text(total.high, place, f"  {short(total.value)}", va="center", fontsize=8.5)
            ticks.append(place)
            names.append(configuration.name)
            place += 1
        label = f"{concurrency} at a time"
        axes.text(
            1.0,
            (start + place - 1) / 2,
            label,
            transform=axes.get_yaxis_transform(),
            rotation=270,
            va="center",
            ha="left",
            fontsize=9,
            color=FAINT,
        )
        place += 0.7
    axes.set_yticks(ticks, names, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12, y=0.02)
    axes.set_xlabel("tokens a second, all requests together")
    caption = f"Total speed of every configuration on {workload}, {told_length(context)}; whiskers are 95 % intervals."
    return finished(canvas, f"speed-{workload}", f"Speed of each configuration: {workload}", caption)


def _pareto(workload: str, rows: Sequence[Measurement]) -> Drawing | None:
    context = shortest_context(rows)
    rows = [
        each
        for each in rows
        if each.numbers.key.context_tokens == context and each.numbers.total_tok_s and each.numbers.user_tok_s
    ]
    if len({each.numbers.key.concurrency for each in rows}) < 2:
        return None
    canvas, axes = canvas_of(height=4.4)
    for configuration, colour in zip(ordered(each.configuration for each in rows), cycle(), strict=False):
        line = sorted(
            (each for each in rows if each.configuration == configuration),
            key=lambda each: each.numbers.key.concurrency,
        )
        across = [sure(each.numbers.user_tok_s).value for each in line]
        up = [sure(each.numbers.total_tok_s).value for each in line]
        axes.plot(across, up, marker="o", markersize=5.5, linewidth=1.6, color=colour, label=configuration.name)
        for x, y, each in zip(across, up, line, strict=True):
            axes.annotate(
                str(each.numbers.key.concurrency), (x, y), textcoords="offset points", xytext=(6, 4), fontsize=8
            )
    axes.set_xlabel("tokens a second of one user")
    axes.set_ylabel("tokens a second in total")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.margins(0.1)
    legend(canvas, [axes])
    caption = (
        f"What one user gets against what all get, on {workload}, {told_length(context)}. Numbers beside the points "
        "are requests at a time; further up and to the right is better."
    )
    return finished(canvas, f"pareto-{workload}", f"Throughput against speed of one user: {workload}", caption)


def _accepted(workload: str, rows: Sequence[Measurement]) -> Drawing | None:
    context = shortest_context(rows)
    rows = [
        each
        for each in rows
        if each.numbers.accepted and each.configuration.mode != "ar" and each.numbers.key.context_tokens == context
    ]
    if not rows:
        return None
    lowest = min(each.numbers.key.concurrency for each in rows)
    rows = [each for each in rows if each.numbers.key.concurrency == lowest]
    rows.sort(key=lambda each: each.configuration.order)
    longest = max(max(each.numbers.accepted) for each in rows)
    canvas, axes = canvas_of(height=1.2 + 0.42 * len(rows))
    grid = [
        [100 * each.numbers.accepted.get(n, 0) / sum(each.numbers.accepted.values()) for n in range(1, longest + 1)]
        for each in rows
    ]
    columns = [str(length) for length in range(1, longest + 1)]
    heat(axes, [[round(share) for share in line] for line in grid], columns, [each.configuration.name for each in rows])
    axes.set_xlabel("tokens that a round committed, the bonus token included")
    caption = (
        f"Of 100 rounds, how many committed so many tokens: {workload}, {told_length(context)}, {lowest} at a time."
    )
    return finished(canvas, f"accepted-{workload}", f"Accepted lengths: {workload}", caption)


def _heat_maps(workload: str, rows: Sequence[Measurement]) -> Drawing | None:
    rows = [each for each in rows if each.numbers.total_tok_s]
    contexts = sorted({each.numbers.key.context_tokens for each in rows}, key=lambda context: context or 0)
    concurrencies = sorted({each.numbers.key.concurrency for each in rows})
    grids: dict[str, list[list[float]]] = {}
    for configuration in ordered(each.configuration for each in rows):
        at = {
            (each.numbers.key.context_tokens, each.numbers.key.concurrency): sure(each.numbers.total_tok_s).value
            for each in rows
            if each.configuration == configuration
        }
        if len({context for context, _ in at}) > 1 and len({concurrency for _, concurrency in at}) > 1:
            grids[configuration.name] = [[at.get((x, y), float("nan")) for y in concurrencies] for x in contexts]
    if not grids:
        return None
    most = max(each.numbers.total_tok_s.value for each in rows if each.numbers.total_tok_s)
    canvas, panels = grid_of(len(grids), 0.9 + 0.45 * len(contexts))
    names = ["as is" if context is None else f"{context:,}" for context in contexts]
    for axes, (name, grid) in zip(panels, grids.items(), strict=True):
        heat(axes, grid, [str(concurrency) for concurrency in concurrencies], names, most)
        axes.set_title(name)
    panels[0].set_ylabel("context (tokens)")
    panels[0].set_xlabel("requests at a time")
    caption = f"Tokens a second in total on {workload}, by length of context and requests at a time; one scale for all."
    return finished(canvas, f"matrix-{workload}", f"Context and concurrency: {workload}", caption)
