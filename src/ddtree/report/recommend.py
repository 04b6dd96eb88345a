"""Which configuration to run, and why."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddtree.bench.statistics import Estimate
from ddtree.report.configuration import Configuration
from ddtree.report.results import Measurement, ResultSet

Place = tuple[str, int | None, int, float]

MOST_ERRORS = 0.01
TIE = 0.02


@dataclass(frozen=True)
class Standing:
    """A configuration over all places where it was measured.

    Attributes:
        score: geometric mean over the places of its total tokens a second, over the best there; 1: best everywhere.
        worst: the smallest of those shares, and where.
    """

    configuration: Configuration
    score: float
    worst: float
    worst_place: str
    places: int


@dataclass(frozen=True)
class Recommendation:
    """See :func:`recommend`. ``standings``: all that were considered, best first; ``left_out``: the others and why."""

    configuration: Configuration | None
    reason: str
    standings: tuple[Standing, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    best_by_place: tuple[tuple[str, str, float], ...] = ()


def recommend(results: ResultSet) -> list[Recommendation]:
    """For each set of places (workload, context, concurrency) measured alike: what loses least against the best.

    Considered is what had at most 1 % errors in each place. The score is the geometric mean of total tokens a second
    over the best in that place. Of configurations within 2 % of the best score the one with the smallest budget is
    taken: it needs the least memory and leaves the most room under load. The set with the most places, then the most
    configurations, comes first. Empty where nothing was measured.
    """
    by_configuration: dict[Configuration, list[Measurement]] = defaultdict(list)
    for each in results.measurements:
        by_configuration[each.configuration].append(each)
    alike: dict[frozenset[Place], dict[Configuration, dict[Place, Measurement]]] = defaultdict(dict)
    for configuration, found in by_configuration.items():
        places = {each.place: each for each in found}
        alike[frozenset(places)][configuration] = places
    order = sorted(alike, key=lambda places: (-len(places), -len(alike[places]), sorted(map(str, places))))
    return [_recommend(alike[places], places) for places in order] or [Recommendation(None, "nothing was measured")]


def _recommend(found: dict[Configuration, dict[Place, Measurement]], places: frozenset[Place]) -> Recommendation:
    considered, left_out = {}, []
    for configuration, measured in sorted(found.items(), key=lambda item: item[0].order):
        if complaint := _complaint(list(measured.values())):
            left_out.append((configuration.name, complaint))
        else:
            considered[configuration] = measured
    if not considered:
        return Recommendation(None, "every configuration had too many errors", (), tuple(left_out))
    names = place_names(places)
    best = {place: max(_speed(measured[place]) for measured in considered.values()) for place in places}
    standings = sorted(
        (_standing(configuration, measured, best, names) for configuration, measured in considered.items()),
        key=lambda standing: -standing.score,
    )
    near = [standing for standing in standings if standing.score >= standings[0].score * (1 - TIE)]
    chosen = min(near, key=lambda standing: _budget_order(standing.configuration))
    winners = tuple(
        (names[place], *max((_winner(c, p[place]) for c, p in considered.items()), key=lambda w: w[1]))
        for place in sorted(places, key=lambda place: (place[0], place[1] or 0, place[2:]))
    )
    return Recommendation(
        chosen.configuration, _reason(chosen, standings, near, considered), tuple(standings), tuple(left_out), winners
    )


def told_place(place: Place) -> str:
    """A place in words."""
    return ", ".join(text for text in _words(place) if text)


def _words(place: Place) -> tuple[str, str, str, str]:
    workload, context, concurrency, temperature = place
    length = "prompts as they are" if context is None else f"{context} tokens of context"
    return workload, length, f"{concurrency} at a time", "" if temperature == 0 else f"temperature {temperature:g}"


def place_names(places: Iterable[Place]) -> dict[Place, str]:
    """Each in words, without the workload and the length of context where all have the same."""
    places = list(places)
    if len(places) < 2:
        return {place: told_place(place) for place in places}
    names = {}
    for place in places:
        kept = [text for axis, text in enumerate(_words(place)) if axis > 1 or len({p[axis] for p in places}) > 1]
        names[place] = ", ".join(text for text in kept if text)
    return names


def _complaint(places: Sequence[Measurement]) -> str:
    for each in places:
        share = each.numbers.error_share
        if share is not None and share.value > MOST_ERRORS:
            return f"{share.value:.1%} errors at {told_place(each.place)}"
        if each.numbers.total_tok_s is None:
            return f"no answer at {told_place(each.place)}"
    return ""


def _standing(
    configuration: Configuration, places: dict[Place, Measurement], best: dict[Place, float], names: dict[Place, str]
) -> Standing:
    shares = {place: _speed(places[place]) / top if top else 0.0 for place, top in best.items()}
    score = math.exp(sum(math.log(max(share, 1e-9)) for share in shares.values()) / len(shares))
    worst = min(shares, key=lambda place: shares[place])
    return Standing(configuration, score, shares[worst], names[worst], len(shares))


def _speed(measurement: Measurement) -> float:
    total = measurement.numbers.total_tok_s
    return total.value if total else 0.0


def _overlap(one: Estimate | None, other: Estimate | None) -> bool:
    return one is not None and other is not None and one.low <= other.high and other.low <= one.high


def _is_near(own: dict[Place, Measurement], other: dict[Place, Measurement]) -> bool:
    return all(_overlap(each.numbers.total_tok_s, other[place].numbers.total_tok_s) for place, each in own.items())


def _winner(configuration: Configuration, measurement: Measurement) -> tuple[str, float]:
    return configuration.name, _speed(measurement)


def _budget_order(configuration: Configuration) -> tuple[float, float, str]:
    budget = configuration.budget
    if configuration.mode == "ar":
        size = 0.0
    elif isinstance(budget, int):
        size = float(budget)
    else:
        size = 15.5 if configuration.mode == "chain" else 512.0
    return size, float(configuration.top_k_cap or 64), configuration.name


def _reason(
    chosen: Standing,
    standings: Sequence[Standing],
    near: Sequence[Standing],
    considered: dict[Configuration, dict[Place, Measurement]],
) -> str:
    own = considered[chosen.configuration]
    words = [
        f"over {chosen.places} {'place' if chosen.places == 1 else 'places'} it reaches {chosen.score:.0%} of the best "
        f"total speed (geometric mean); at its worst, {chosen.worst_place}, {chosen.worst:.0%}"
    ]
    if len(near) > 1:
        others = ", ".join(each.configuration.name for each in near if each is not chosen)
        words.append(f"within {TIE:.0%} of the best are {others} too, and this one has the smallest budget")
    else:
        after = next((each for each in standings if each is not chosen), None)
        if after:
            words.append(f"next is {after.configuration.name} with {after.score:.0%}")
    alike = [each for each in standings if each is not chosen and _is_near(own, considered[each.configuration])]
    if alike:
        them = ", ".join(each.configuration.name for each in alike)
        words.append(f"its intervals overlap everywhere with those of {them}: chance may have put them in this order")
    shared = chosen.configuration.others_without_drafts
    plain = next((c for c in considered if c.mode == "ar" and c.others_without_drafts == shared), None)
    if plain and plain != chosen.configuration:
        gains = [
            _speed(measurement) / _speed(considered[plain][place])
            for place, measurement in considered[chosen.configuration].items()
            if place in considered[plain] and _speed(considered[plain][place])
        ]
        if gains:
            words.append(f"against plain decoding it is {min(gains):.2f} to {max(gains):.2f} times as fast")
    return "; ".join(words)
