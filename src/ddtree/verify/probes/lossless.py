"""Does speculation change what the model says? Each token of a few answers against the target along the same path."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree.verify.answer import Order
from ddtree.verify.engines import NotOffered
from ddtree.verify.finding import Finding, proven, unknown, violated
from ddtree.verify.forced import EXACT_NATS, NEAR_TIE_NATS, Forced
from ddtree.verify.http_client import Refused
from ddtree.verify.prompts import speculation_orders
from ddtree.verify.session import Session

_PROMPTS = 3
_CLAIM = "every token is the target's own choice, or a near-tie"


def probe_lossless(session: Session) -> Iterator[Finding]:
    """Raises CheckFailed."""
    adapter = session.adapter
    held: list[Forced] = []
    bound = EXACT_NATS if session.effective.settings.get("dtype") == "float32" else NEAR_TIE_NATS
    try:
        for order in speculation_orders(session.options.probe_tokens)[:_PROMPTS]:
            prompt = adapter.tokenize(order)
            if session.effective.engine == "native":  # its plain path is asked by the tokens that were written
                answer = adapter.answer(Order(prompt, order.max_tokens, top_logprobs=1))
            else:
                answer = adapter.answer(Order(prompt, order.max_tokens))
            held.append(adapter.force(prompt, answer))
    except (NotOffered, Refused) as reason:
        yield unknown("lossless", _CLAIM, str(reason), is_required=False)
        return
    tokens = sum(each.tokens for each in held)
    apart = [divergence for each in held for divergence in each.divergences]
    faults = [divergence for divergence in apart if divergence.is_fault(bound)]
    joined = Forced(tokens, tuple(apart), held[0].method)
    seen = [
        f"{tokens} tokens of {len(held)} answers, by {joined.method}",
        f"{len(apart)} differ from the first choice, {len(faults)} by more than {bound:g} nats; "
        f"gaps in nats: {joined.histogram()}",
    ]
    seen += [f"an answer was not checked to its end: {each.cut_short}" for each in held if each.cut_short]
    if not tokens:
        yield unknown("lossless", _CLAIM, *seen, is_required=False)
        return
    session.measured["near_ties"] = float(len(apart) - len(faults))
    if faults:
        first = faults[0]
        yield violated(
            "lossless",
            _CLAIM,
            *seen,
            f"first fault: {first.token!r} at place {first.index}, where the target says {first.top!r} "
            f"({first.gap:.3f} nats above)",
            remedy="verification is broken: tree mask, positions or cache move; try budget 1, graphs off, "
            "another attention backend",
        )
    else:
        yield proven("lossless", _CLAIM, *seen)
