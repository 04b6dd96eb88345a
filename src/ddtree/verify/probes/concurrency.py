"""Are requests that come at the same time all answered, each its own question, and with speculation?"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ddtree.verify.answer import Answer, Order
from ddtree.verify.finding import Finding, proven, unknown, violated
from ddtree.verify.http_client import CheckFailed, Hung
from ddtree.verify.probes.speculation import ONE, acceptance_length, joined
from ddtree.verify.prompts import speculation_orders
from ddtree.verify.session import Session


def probe_concurrency(session: Session) -> Iterator[Finding]:
    """As many as the server runs at once, at most the options' number. Raises CheckFailed without counters."""
    most = session.effective.settings.get("max_running_requests")
    n = min(session.options.concurrency, most if isinstance(most, int) else session.options.concurrency)
    claim = f"{n} requests at once are all answered"
    if n < 2:
        words = "the server runs one request at a time" if most == 1 else "left out by --concurrency"
        yield unknown("concurrency", "requests at once are answered", words, is_required=False)
        return
    orders = (speculation_orders(session.options.probe_tokens) * (n // 6 + 1))[:n]
    before = session.adapter.counters()
    with ThreadPoolExecutor(n) as pool:
        results = list(pool.map(lambda order: _ask(session, order), orders))
    failed = [result for result in results if isinstance(result, CheckFailed)]
    answers = [result for result in results if isinstance(result, Answer)]
    if failed:
        health = f"; {session.health()}" if any(isinstance(each, Hung) for each in failed) else ""
        yield violated(
            "concurrency",
            claim,
            f"{len(failed)} of {n} failed: {failed[0]}{health}",
            remedy="look into the server's log; lower the number of running requests",
        )
        return
    moved = session.moved_since(before, sum(answer.completion_tokens for answer in answers))
    yield proven("concurrency", claim, f"{sum(a.completion_tokens for a in answers)} tokens in {n} answers")
    is_off = session.moved is not None and session.moved.verify_calls == 0  # found out and told already
    if session.expectation.speculates == "none" or is_off:
        return
    told = joined([answer.rounds for answer in answers if answer.rounds is not None])
    calls = told.count if told is not None else moved.verify_calls
    tau = acceptance_length(answers, told, moved)
    claim = "speculation is active at this concurrency too"
    if calls is None or (calls and tau is None):
        yield unknown("concurrency", claim, "neither responses nor counters tell verify calls", is_required=False)
    elif not calls or tau is None or tau <= ONE:
        yield violated(
            "concurrency",
            claim,
            f"{calls:g} verify calls" + (f", tau {tau:.2f}" if tau is not None else ""),
            remedy="batched speculation is broken or off under load: look for a batch-size threshold in its settings",
        )
    else:
        yield proven("concurrency", claim, f"{calls:g} verify calls, tau {tau:.2f}")


def _ask(session: Session, order: Order) -> Answer | CheckFailed:
    try:
        return session.adapter.answer(order)
    except CheckFailed as error:
        return error
