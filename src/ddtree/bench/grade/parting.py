"""Where two answers to the same prompt part, and whether rounding explains it."""

from __future__ import annotations

import math
from typing import Literal

from ddtree.bench.record import Record

PartingKind = Literal["same", "near-tie", "fault", "unknown"]


class Chance(Record):
    """A token of an answer with the likeliest alternatives at its place, best first, in nats."""

    token: str
    logprob: float
    top: list[tuple[str, float]]


class Parting(Record):
    """How two answers compare.

    Attributes:
        index: the first token that differs, from 0.
        gap_nats: by how much either side preferred its own token to the other's, the larger of the two; infinite is
            written as None, with ``kind`` fault.
        detail: for people.
    """

    kind: PartingKind
    index: int | None = None
    token: str | None = None
    other: str | None = None
    gap_nats: float | None = None
    detail: str = ""


def parting(
    first: list[Chance] | None, second: list[Chance] | None, texts: tuple[str, str], bound_nats: float
) -> Parting:
    """Compare two greedy answers.

    Up to the first token that differs both sides have read the same text, so the log-probabilities that each told at
    that place are of the same distribution but for rounding. A near-tie: each side preferred its own token by at most
    ``bound_nats``. More is a fault: one of the two wrote what the target would not have written.
    """
    if texts[0] == texts[1] and (first is None or second is None or _tokens(first) == _tokens(second)):
        return Parting(kind="same")
    if first is None or second is None:
        return Parting(kind="unknown", detail="the texts differ, and the server told no log-probabilities")
    index = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a.token != b.token), None)
    if index is None:
        shorter = min(len(first), len(second))
        return Parting(kind="unknown", index=shorter, detail="one answer ends where the other goes on")
    ours, theirs = first[index], second[index]
    gap = max(_gap(ours, theirs.token), _gap(theirs, ours.token))
    detail = f"{_told(ours)} against {_told(theirs)}"
    return Parting(
        kind="near-tie" if gap <= bound_nats else "fault",
        index=index,
        token=ours.token,
        other=theirs.token,
        gap_nats=None if math.isinf(gap) else round(gap, 6),
        detail=detail,
    )


def _gap(chance: Chance, other: str) -> float:
    """How much less likely ``other`` was than the token taken; infinite where it is not among the alternatives."""
    found = next((logprob for token, logprob in chance.top if token == other), -math.inf)
    return max(0.0, chance.logprob - found)


def _tokens(chances: list[Chance]) -> list[str]:
    return [chance.token for chance in chances]


def _told(chance: Chance) -> str:
    top = ", ".join(f"{token!r} {logprob:.3f}" for token, logprob in chance.top[:3])
    return f"{chance.token!r} ({top})"
