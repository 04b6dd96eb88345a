"""The findings report as Markdown: what was found first, then the numbers, then how to get them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import median

from ddtree.bench.grade.run import Grades
from ddtree.report.compare import Change
from ddtree.report.drawing import Drawing
from ddtree.report.how_measured import machines, method, reproduce, run_name
from ddtree.report.markdown import table, told_estimate, told_number, told_value
from ddtree.report.recommend import Recommendation, place_names, told_place
from ddtree.report.results import ResultSet
from ddtree.report.roofline import Machine, Share

_LAG_MS = 25.0
_WIDE = 0.05
_QUANTITIES = {
    "user_tok_s": "tok/s of one user",
    "total_tok_s": "tok/s in total",
    "ttft_ms": "TTFT ms",
    "errors": "share of errors",
    "all": "everything",
}


def findings(
    title: str,
    results: ResultSet,
    recommendations: Sequence[Recommendation],
    drawings: Sequence[Drawing],
    roofline: tuple[Machine, list[Share]] | None,
    changes: Sequence[Change] | None,
    threshold: float,
) -> str:
    """The report's text; drawings are linked as ``figures/NAME.svg``."""
    parts = [f"# {title}", _summary(results), _recommended(recommendations, results)]
    if changes is not None:
        parts.append(_comparison(changes, threshold))
    parts += [_speeds(results), _figures(drawings), _grades(results.grades), _roofline(roofline), _failures(results)]
    parts += [method(results), reproduce(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(results: ResultSet) -> str:
    if not results.measurements:
        return ""
    requests = sum(each.numbers.requests for each in results.measurements)
    errors = sum(sum(each.numbers.errors.values()) for each in results.measurements)
    configurations = len(results.configurations)
    engines = sorted({session.engine for session in results.sessions})
    first = min((session.started_at for session in results.sessions), default=0.0)
    day = datetime.fromtimestamp(first, UTC).strftime("%Y-%m-%d")
    return (
        f"{configurations} configuration{'s' * (configurations != 1)} on {', '.join(results.workloads)}: "
        f"{requests:,} requests, {errors} of them with errors. Engine: {', '.join(engines)}. Measured from {day}."
    )


def _recommended(recommendations: Sequence[Recommendation], results: ResultSet) -> str:
    first, *others = recommendations
    parts = ["## Recommendation", _one_recommended(first, _how_sure(first, results))]
    if any(each.is_faulty for each in results.grades):
        parts.append("**Answers were found that rounding does not explain** (see Correctness): clear that up first.")
    if len(machines(results)) > 1:
        parts.append("The results are of several machines, so that differences may be those of machines.")
    for other in others:
        if len(other.standings) > 1:
            where = "; ".join(place for place, _, _ in other.best_by_place)
            parts.append(f"### Measured apart: {where}\n\n{_one_recommended(other)}")
    return "\n\n".join(parts)


def _how_sure(recommendation: Recommendation, results: ResultSet) -> str:
    """What the recommendation rests on: how much was measured, and how wide the intervals are."""
    totals = [each.numbers.total_tok_s for each in results.measurements if each.numbers.total_tok_s]
    if recommendation.configuration is None or not totals:
        return ""
    half = median((each.high - each.low) / 2 / each.value for each in totals if each.value)
    length_s = median(each.numbers.unit_s for each in results.measurements)
    repetitions = sorted({each.numbers.repetitions for each in results.measurements})
    words = [
        f"How sure: {' to '.join(map(str, repetitions[:: max(1, len(repetitions) - 1)]))} repetitions of "
        f"{length_s:.1f} s (median) stand behind a number, and the 95 % interval of a total speed reaches {half:.0%} "
        "to either side (median)."
    ]
    if half > _WIDE:
        words.append("Longer units and more repetitions (`--requests`, `--repeats`) tell more.")
    return " ".join(words)


def _one_recommended(recommendation: Recommendation, how_sure: str = "") -> str:
    if recommendation.configuration is None:
        return f"None: {recommendation.reason}."
    parts = [f"**{recommendation.configuration.name}**: {recommendation.reason}."]
    if how_sure:
        parts.append(how_sure)
    if len(recommendation.standings) > 1:
        rows = [
            (each.configuration.name, f"{each.score:.1%}", f"{each.worst:.1%}", each.worst_place)
            for each in recommendation.standings
        ]
        parts.append(table(("configuration", "of the best", "at its worst", "where"), rows, "lrrl"))
    if len(recommendation.best_by_place) > 1:
        fastest = [(place, name, told_value(speed)) for place, name, speed in recommendation.best_by_place]
        names = ("place", "configuration", "tok/s in total")
        parts.append("Fastest in each place:\n\n" + table(names, fastest, "llr"))
    if recommendation.left_out:
        parts.append("Not considered:\n\n" + "\n".join(f"- {name}: {why}" for name, why in recommendation.left_out))
    return "\n\n".join(parts)


def _comparison(changes: Sequence[Change], threshold: float) -> str:
    counts = Counter(change.judgement for change in changes)
    bad = counts["regression"] + counts["lost"]
    verdict = f"**{bad} regressions**" if bad else "No regression"
    rows = [
        (
            change.configuration,
            change.place,
            _QUANTITIES[change.quantity],
            told_value(change.old),
            told_value(change.new),
            "-" if change.ratio is None else f"{change.ratio:.3f}",
            f"**{change.judgement}**" if change.judgement in ("regression", "lost") else change.judgement,
        )
        for change in changes
        if change.judgement != "same"
    ]
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    head = f"## Against the baseline\n\n{verdict} beyond {threshold:.0%} ({told})."
    if not rows:
        return head
    names = ("configuration", "place", "quantity", "before", "now", "now / before", "judgement")
    return f"{head}\n\n{table(names, rows, 'lllrrrl')}"


def _speeds(results: ResultSet) -> str:
    if not results.measurements:
        return ""
    parts = ["## Numbers"]
    for place in dict.fromkeys(each.place for each in results.measurements):
        rows = []
        cells = [each for each in results.measurements if each.place == place]
        with_cache = any(each.numbers.cached_share for each in cells)
        for each in cells:
            numbers = each.numbers
            cached = "-" if numbers.cached_share is None else f"{numbers.cached_share:.0%}"
            rows.append(
                (
                    each.configuration.name,
                    told_estimate(numbers.user_tok_s),
                    told_estimate(numbers.total_tok_s) + ("" if numbers.total_is_steady else " *"),
                    told_estimate(numbers.ttft_ms),
                    told_value(numbers.ttft_p95_ms),
                    told_estimate(numbers.tau),
                    *([cached] if with_cache else []),
                    f"{sum(numbers.errors.values())}/{numbers.requests}",
                )
            )
        names = ["configuration", "tok/s of one user", "tok/s in total", "TTFT ms", "TTFT p95", "tau"]
        names += ["cached", "errors"] if with_cache else ["errors"]
        parts.append(f"### {told_place(place)}\n\n{table(names, rows, 'l' + 'r' * (len(names) - 1))}")
    if any(not each.numbers.total_is_steady for each in results.measurements):
        parts.append("\\* over whole repetitions: there was no steady window in each of them.")
    return "\n\n".join(parts)


def _figures(drawings: Sequence[Drawing]) -> str:
    if not drawings:
        return ""
    parts = [f"### {each.title}\n\n![{each.title}](figures/{each.name}.svg)\n\n{each.caption}" for each in drawings]
    return "## Plots\n\n" + "\n\n".join(parts)


def _grades(grades: Sequence[Grades]) -> str:
    parts = []
    for each in grades:
        scores = []
        for score in each.scores:
            share = score.pass_at_1
            told = "-" if share is None else f"{share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"
            scores.append((score.side, told, f"{score.passed} of {score.judged}", str(score.errors)))
        shares = table(("side", "pass@1", "passed", "no answer"), scores, "lrrr")
        parts.append(f"### {each.record.workload.name}\n\n{shares}")
        for side in list(each.record.sides)[1:]:
            compared = [row for row in each.comparisons if row.side == side]
            kinds = Counter(row.parting.kind for row in compared)
            told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            changed = [row for row in compared if row.verdict_changed]
            against = compared[0].against if compared else "-"
            parts.append(f"{side} against {against}: {told}; {len(changed)} verdicts changed.")
            shown = [row for row in compared if row.verdict_changed or row.parting.kind == "fault"]
            if shown:
                rows = [
                    (
                        row.problem_id,
                        f"{row.verdicts[1]} to {row.verdicts[0]}",
                        row.parting.kind,
                        str(row.parting.index),
                        told_number(row.parting.gap_nats, ".4f"),
                        row.parting.detail,
                    )
                    for row in shown
                ]
                names = ("problem", "verdict", "texts", "token", "gap (nats)", "evidence")
                parts.append(table(names, rows, "lllrrl"))
        if each.record.note:
            parts.append(f"Note: {each.record.note}.")
        parts.append(f"Programs ran in isolation by: {each.record.isolation}.")
    return "## Correctness\n\n" + "\n\n".join(parts) if parts else ""


def _roofline(roofline: tuple[Machine, list[Share]] | None) -> str:
    if roofline is None:
        return (
            "## Fraction of the bound\n\nNot told: the memory bandwidth of the hardware or the size of the weights is "
            "not known. Give --target-gb, --drafter-gb and, for hardware without a data sheet here, --bandwidth-gb-s."
        )
    machine, found = roofline
    places = place_names({each.measurement.place for each in found})
    names, alignment = ["configuration", "place", "tok/s of one user", "bound", "share"], "llrrr"
    rows = [
        [
            each.measurement.configuration.name,
            places[each.measurement.place],
            told_value(each.share * each.bound_tok_s),
            told_value(each.bound_tok_s),
            f"{each.share:.1%}",
        ]
        for each in found
    ]
    head = (
        f"## Fraction of the bound\n\nAgainst reading {machine.target_gb:g} GB of the target and "
        f"{machine.drafter_gb:g} GB "
        f"of the drafter once a round at {machine.bandwidth_gb_s:g} GB/s ({machine.source}); K/V, arithmetic and "
        "launches are left out of the bound, and tau is the measured one. What is missing is theirs and the host's."
    )
    if len(places) == 1:  # said once
        head += f" All at {next(iter(places.values()))}."
        alignment = "lrrr"
        for row in (names, *rows):
            del row[1]
    return f"{head}\n\n{table(names, rows, alignment)}"


def _failures(results: ResultSet) -> str:
    rows: list[tuple[str, str, str]] = []
    for each in results.measurements:
        for kind, count in each.numbers.errors.items():
            place = f"{each.configuration.name}; {told_place(each.place)}"
            rows.append((place, kind, f"{count} of {each.numbers.requests} requests"))
    for point in results.points:
        if point.status not in ("measured", "same"):
            rows.append((point.point, point.status, point.reason))
    for kind, texts in (("unfinished", results.unfinished), ("twice", results.twice)):
        rows += [(what, kind, detail.strip()) for what, _, detail in (text.rpartition(": ") for text in texts)]
    if late := [each.numbers.client_lag_ms for each in results.measurements if each.numbers.client_lag_ms > _LAG_MS]:
        told = f"the client's event loop was late by up to {max(late):.0f} ms: a busy machine; latencies hold it too"
        rows.append((f"{len(late)} of {len(results.measurements)} cells", "client lag", told))
    for run in results.runs:
        sessions = sum(session.run_id == run.run_id for session in results.sessions)
        if sessions > 1:
            told = f"measured in {sessions} goes; a unit that was cut off was measured again as a whole"
            rows.append((run_name(run), "resumed", told))
    for each in results.measurements:
        place = f"{each.configuration.name}; {told_place(each.place)}"
        rows += [(place, "server's note", told) for told in each.numbers.notes]
    same = [point for point in results.points if point.status == "same"]
    parts = ["## Failures and remarks"]
    parts.append(table(("what", "kind", "detail"), rows, "lll") if rows else "None.")
    if same:
        parts.append("Points that differ only in keys without effect ran once: ")
        parts.append("\n".join(f"- {point.point}: as {point.same_as}" for point in same))
    return "\n\n".join(parts)
