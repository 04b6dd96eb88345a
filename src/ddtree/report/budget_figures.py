"""Plots of what a node of the tree brings: speed and tau against the budget, tau against the context."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from ddtree.bench.statistics import Estimate
from ddtree.report.drawing import MODE_COLOURS, Drawing, canvas_of, curve, cycle, finished, legend, panels_of
from ddtree.report.results import Measurement
from ddtree.report.selection import ordered, shortest_context, sure, told_length


def speed_by_budget(workload: str, rows: Sequence[Measurement]) -> Drawing | None:
    return _by_budget(
        workload,
        rows,
        "user-speed",
        "Speed of one user against budget",
        "tokens a second of one user",
        lambda each: each.numbers.user_tok_s,
        with_plain=True,
    )


def tau_by_budget(workload: str, rows: Sequence[Measurement]) -> Drawing | None:
    return _by_budget(
        workload,
        rows,
        "tau",
        "Tau against budget",
        "committed tokens a round (tau)",
        lambda each: each.numbers.tau,
        with_plain=False,
    )


def _by_budget(
    workload: str,
    rows: Sequence[Measurement],
    name: str,
    title: str,
    label: str,
    value: Callable[[Measurement], Estimate | None],
    with_plain: bool,
) -> Drawing | None:
    context = shortest_context(rows)
    rows = [each for each in rows if each.numbers.key.context_tokens == context and value(each)]
    trees = [each for each in rows if isinstance(each.configuration.budget, int) and each.configuration.mode == "tree"]
    budgets = sorted({_budget(each) for each in trees})
    if len(budgets) < 2:
        return None
    concurrencies = sorted({each.numbers.key.concurrency for each in trees})
    canvas, panels = panels_of(len(concurrencies))
    for concurrency, axes in zip(concurrencies, panels, strict=True):
        lines: dict[str, list[Measurement]] = defaultdict(list)
        for each in trees:
            if each.numbers.key.concurrency == concurrency:
                lines[each.configuration.family].append(each)
        for place, ((family, line), colour) in enumerate(zip(sorted(lines.items()), cycle(), strict=False)):
            aside = 0.05 * (place - (len(lines) - 1) / 2)  # so that whiskers do not hide each other
            line.sort(key=_budget)
            places = [budgets.index(_budget(each)) + aside for each in line]
            curve(axes, places, [sure(value(each)) for each in line], colour, family)
        if with_plain:
            for each in rows:
                if each.configuration.mode in ("ar", "chain") and each.numbers.key.concurrency == concurrency:
                    plain = sure(value(each))
                    colour = MODE_COLOURS[each.configuration.mode]
                    axes.axhline(
                        plain.value, color=colour, linestyle="--", linewidth=1.4, label=each.configuration.name
                    )
        axes.set_xticks(range(len(budgets)), [str(budget) for budget in budgets])
        axes.set_xlabel("budget (nodes)")
        axes.set_title(f"{concurrency} at a time")
        axes.margins(x=0.08)
    panels[0].set_ylim(bottom=0)  # once all have drawn on the scale that they share: it grows no more after that
    panels[0].set_ylabel(label)
    legend(canvas, panels)
    caption = f"{title} on {workload}, {told_length(context)}; whiskers are 95 % intervals."
    return finished(canvas, f"{name}-by-budget-{workload}", f"{title}: {workload}", caption)


def tau_by_context(workload: str, rows: Sequence[Measurement]) -> Drawing | None:
    rows = [each for each in rows if each.numbers.tau and each.configuration.mode != "ar"]
    lowest = min((each.numbers.key.concurrency for each in rows), default=1)
    rows = [each for each in rows if each.numbers.key.concurrency == lowest]
    rows = [each for each in rows if sum(other.configuration == each.configuration for other in rows) > 1]
    contexts = sorted({each.numbers.key.context_tokens for each in rows}, key=lambda context: context or 0)
    if len(contexts) < 2:
        return None
    canvas, axes = canvas_of(height=3.6)
    for configuration, colour in zip(ordered(each.configuration for each in rows), cycle(), strict=False):
        line = [each for each in rows if each.configuration == configuration]
        line.sort(key=lambda each: each.numbers.key.context_tokens or 0)
        places = [contexts.index(each.numbers.key.context_tokens) for each in line]
        curve(axes, places, [sure(each.numbers.tau) for each in line], colour, configuration.name)
    axes.set_xticks(range(len(contexts)), ["as is" if c is None else f"{c:,}" for c in contexts])
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("committed tokens a round (tau)")
    axes.set_ylim(bottom=0)
    legend(canvas, [axes])
    caption = f"Tau by length of context on {workload}, {lowest} at a time."
    return finished(canvas, f"tau-by-context-{workload}", f"Tau against context: {workload}", caption)


def _budget(each: Measurement) -> int:
    assert isinstance(each.configuration.budget, int)
    return each.configuration.budget
