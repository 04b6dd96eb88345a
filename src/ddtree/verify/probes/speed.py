"""Is decoding as fast as declared, and as it was when it was last proven?

On the client's clock, one request at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from ddtree.verify.answer import Order
from ddtree.verify.baseline import digest
from ddtree.verify.finding import Finding, proven, unknown, violated
from ddtree.verify.http_client import Garbled
from ddtree.verify.prompts import SPECULATION, fresh_number
from ddtree.verify.session import Session

_TRIES = 3
_MORE_TRIES = 3


def probe_speed(session: Session) -> Iterator[Finding]:
    """The median of a few streams; measured again before it is called slow. Raises CheckFailed."""
    floor, slowest = session.expectation.tok_s_floor, _slowest(session)
    limit = max(floor or 0.0, slowest or 0.0)
    try:
        speeds = [_measure(session) for _ in range(_TRIES)]
        if median(speeds) < limit:
            speeds += [_measure(session) for _ in range(_MORE_TRIES)]
    except Garbled as error:
        yield unknown("speed", "decoding is fast enough", str(error), is_required=floor is not None)
        return
    # A neighbour on the machine can only make a stream slower: the better half tells what the engine can do.
    found = median(sorted(speeds)[len(speeds) // 2 :]) if len(speeds) > _TRIES else median(speeds)
    session.measured["decode_tok_s"] = round(found, 2)
    seen = f"{found:.1f} tok/s (of {len(speeds)} streams: {min(speeds):.1f} to {max(speeds):.1f})"
    if floor is not None:
        claim = f"one request decodes at least {floor:g} tok/s"
        if found < floor:
            yield violated("speed", claim, seen, remedy="look for another load, lost CUDA graphs or a lower clock")
        else:
            yield proven("speed", claim, seen)
    yield _against_baseline(session, found, seen, slowest)


def _slowest(session: Session) -> float | None:
    """The slowest speed that counts as before; None where there is nothing to compare with."""
    baseline = session.baseline
    if baseline is None or baseline.decode_tok_s is None:
        return None
    if baseline.settings_digest != digest(session.effective.settings, session.effective.version):
        return None
    return baseline.decode_tok_s * session.options.speed_tolerance


def _against_baseline(session: Session, found: float, seen: str, slowest: float | None) -> Finding:
    claim = "decoding is about as fast as when it was verified"
    baseline = session.baseline
    if slowest is None or baseline is None:
        why = "there is no verified run of these settings to compare with"
        return unknown("speed", claim, seen, why, is_required=False)
    words = f"{baseline.decode_tok_s:.1f} tok/s on {baseline.verified_at}; the limit is {slowest:.1f}"
    if found < slowest:
        return violated(
            "speed",
            claim,
            seen,
            words,
            remedy="look for another load, lost CUDA graphs or a lower clock; after a wanted change: --new-baseline",
        )
    return proven("speed", claim, seen, words)


def _measure(session: Session) -> float:
    order = Order(f"{SPECULATION[0].text} (Order {fresh_number()}.)", session.options.speed_tokens, is_chat=True)
    return session.adapter.speed(order, session.options.answer_timeout_s).decode_tok_s
