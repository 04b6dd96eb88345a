"""Where two greedy texts part: is it rounding, or a fault? Decided by plain decoding's own probabilities."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from servers import Answer, Server

STEP = 0.125
"""Distance of neighbouring bfloat16 numbers from 16 to 32, where the best logits of the target lie."""

MOST_STEPS = 4


@dataclass(frozen=True)
class Parting:
    """The first difference of one prompt.

    Attributes:
        prompt: which.
        place: tokens before it.
        gap: log-probability by which plain decoding, given the same tokens before, prefers its best token to the one
            that was taken.
        other_gap: the same for the token of the text that it was compared with.
    """

    prompt: int
    place: int
    gap: float
    other_gap: float


def first_difference(got: Answer, want: Answer) -> tuple[int, int, int] | None:
    """Place and both tokens there, the end of a text being a token too; None where the texts are equal."""
    one, other = (answer.token_ids + _end(answer) for answer in (got, want))
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place, a, b
    return None


def _end(answer: Answer) -> list[int]:
    reason = answer.meta.get("finish_reason") or {}
    matched = reason.get("matched")
    if reason.get("type") != "stop" or not isinstance(matched, int) or answer.token_ids[-1:] == [matched]:
        return []
    return [matched]


def partings(
    plain: Server, prompts: list[list[int]], got: list[Answer], want: list[Answer]
) -> tuple[list[int | None], list[Parting]]:
    """First differences by prompt, and what plain decoding says of each."""
    found = [first_difference(a, b) for a, b in zip(got, want, strict=True)]

    def judge(job: tuple[int, tuple[int, int, int]]) -> Parting:
        prompt, (place, mine, other) = job
        before = prompts[prompt] + want[prompt].token_ids[:place]
        asked = {"return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [mine, other]}
        meta = plain.generate(before, asked=asked, max_new_tokens=1).meta
        best = float(meta["output_top_logprobs"][0][0][0])
        by_id = {int(row[1]): float(row[0]) for row in meta["output_token_ids_logprobs"][0]}
        return Parting(prompt, place, best - by_id[mine], best - by_id[other])

    jobs = [(i, difference) for i, difference in enumerate(found) if difference is not None]
    with ThreadPoolExecutor(4) as pool:
        return [None if d is None else d[0] for d in found], list(pool.map(judge, jobs))


def verdict(places: list[int | None], parted: list[Parting], most: float = MOST_STEPS * STEP) -> dict[str, Any]:
    """Counts for a table: equal texts, near-ties, faults, and gaps in bfloat16 steps."""
    steps = Counter(round(parting.gap / STEP, 1) for parting in parted)
    return {
        "texts": len(places),
        "equal": sum(place is None for place in places),
        "near_ties": sum(parting.gap <= most for parting in parted),
        "faults": sum(parting.gap > most for parting in parted),
        "largest_gap": max((parting.gap for parting in parted), default=0.0),
        "gaps_in_steps": {str(step): steps[step] for step in sorted(steps)},
        "partings": [asdict(parting) for parting in parted],
    }
