"""Tokens a second of a unit as a whole, and over the window in which every slot was busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.bench.record import RequestRow

LEAST_WINDOW_SHARE = 0.2
"""Of the unit's time; a shorter window says little about a steady state."""


@dataclass(frozen=True)
class Throughput:
    """See :func:`throughput`. Seconds count from the start of the unit."""

    whole_tok_s: float
    steady_tok_s: float | None
    window_s: tuple[float, float] | None


def throughput(rows: Sequence[RequestRow], concurrency: int, duration_s: float) -> Throughput:
    """Total speed of a unit whose slots each send a request as soon as the one before has ended.

    The steady window begins when twice as many requests as slots have been sent, so that the first burst is over, and
    ends when the last request is sent: from then on slots run dry one after the other. Both ends are moments at which a
    request is sent, so that waits for first tokens and decoding are in it as they are in the long run. It counts only
    where it is at least a fifth of ``duration_s``. Tokens of an answer are spread over its events in the proportion of
    their characters, since events may hold several tokens. Failed requests bring no tokens.
    """
    good = [row for row in rows if row.error_kind is None]
    whole = sum(row.completion_tokens or 0 for row in good) / duration_s if duration_s > 0 else 0.0
    window = _window(rows, concurrency)
    if window is None or window[1] - window[0] < LEAST_WINDOW_SHARE * duration_s:
        return Throughput(whole, None, None)
    tokens = sum(_tokens_within(row, *window) for row in good)
    return Throughput(whole, tokens / (window[1] - window[0]), window)


def decode_tok_s(row: RequestRow) -> float | None:
    """Tokens a second of one answer after its first: ``(tokens - 1) / (last - first)``.

    The tokens are those of usage, not the number of events. None for a failed request, and where everything came in
    one event.
    """
    if row.error_kind is not None or row.ttft_ms is None or row.last_ms is None or not row.completion_tokens:
        return None
    length_s = (row.last_ms - row.ttft_ms) / 1e3
    return (row.completion_tokens - 1) / length_s if length_s > 0 and row.completion_tokens > 1 else None


def _window(rows: Sequence[RequestRow], concurrency: int) -> tuple[float, float] | None:
    sent = sorted(row.sent_s for row in rows)
    if len(sent) <= 2 * concurrency:
        return None
    begin, end = sent[2 * concurrency - 1], sent[-1]
    return (begin, end) if end > begin else None


def _tokens_within(row: RequestRow, begin_s: float, end_s: float) -> float:
    characters = sum(row.chunk_chars)
    if not characters:
        return 0.0
    inside = sum(
        size
        for at_ms, size in zip(row.chunk_ms, row.chunk_chars, strict=True)
        if begin_s <= row.sent_s + at_ms / 1e3 < end_s
    )
    return (row.completion_tokens or 0) * inside / characters
