"""One streamed answer, read with the time of every event."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ddtree.bench.endpoint import error_words
from ddtree.bench.http_client import FAILURES, OK, Arrival, HttpClient, read_up_to
from ddtree.bench.sse import EventReader, EventTooLong
from ddtree.bench.told import read_json, words

_THOUGHTS = ("reasoning_content", "reasoning")
"""Fields of a delta that hold generated text beside ``content``; servers name the thinking part in two ways."""
_ACCOUNTS = ("ddtree", "meta_info", "metrics")
_RARE_FIELDS = frozenset((*_ACCOUNTS, "error", "usage"))
_MOST_REFUSAL_BYTES = 2**16
_STALL_SLACK = 0.02
"""Setting a timer costs as much as reading an event: it is set this share of the stall's time too late, and anew only
once that is used up."""
_MOST_REASON_CHARS = 100


@dataclass
class Answer:
    """What came back for one request. Times are milliseconds since it was sent.

    Attributes:
        error_kind: None where the stream came to its proper end.
        text: all that was generated, in order.
        reply: of it, what belongs to the conversation: no thinking.
        told: the engine's own account of the drafting, where there is one.
        key: what must not stand in ``error_text``.
    """

    error_kind: str | None = None
    error_text: str | None = None
    http_status: int | None = None
    chunk_ms: list[float] = field(default_factory=list)
    chunk_chars: list[int] = field(default_factory=list)
    last_ms: float | None = None
    end_ms: float = 0.0
    text: str = ""
    reply: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    told: dict[str, Any] = field(default_factory=dict)
    key: str | None = field(default=None, repr=False)

    @property
    def ttft_ms(self) -> float | None:
        """Arrival of the first text."""
        return self.chunk_ms[0] if self.chunk_ms else None

    def fail(self, kind: str, text: str) -> None:
        """Note the first thing that went wrong."""
        if self.error_kind is None:
            self.error_kind, self.error_text = kind, words(text, self.key)


async def ask(
    client: HttpClient, url: str, body: dict[str, Any], request_timeout_s: float, stall_timeout_s: float
) -> Answer:
    """Send ``body`` and read the stream to its end; whatever goes wrong is in the answer, nothing is raised.

    Args:
        request_timeout_s: longest time for all of it, the wait for the first event included.
        stall_timeout_s: longest time between events that carry data, once there was one; up to 2 % more may pass.
    """
    answer = Answer(key=client.key)
    content = json.dumps(body).encode()
    loop = asyncio.get_running_loop()
    sent, deadline = time.perf_counter(), loop.time() + request_timeout_s
    try:
        async with asyncio.timeout_at(deadline) as limit, client.stream(url, content) as response:
            answer.http_status = response.status
            if response.status != OK:
                await _read_refusal(response, answer)
            elif not await _read_stream(response, client.arrival(response), answer, sent, limit, stall_timeout_s):
                answer.fail("broken_stream", "the stream ended without [DONE]")
    except EventTooLong:
        answer.fail("broken_stream", "an event has no end")
    except FAILURES as error:
        failure = client.failed(error)
        if failure.is_gone:
            answer.fail("no_connection", str(failure))
        elif not isinstance(error, TimeoutError):
            answer.fail("broken_stream", str(failure))
        elif loop.time() < deadline - 0.001:
            answer.fail("stalled", f"nothing came for {stall_timeout_s:g} s")
        else:
            answer.fail("timeout", f"not done after {request_timeout_s:g} s")
    answer.end_ms = (time.perf_counter() - sent) * 1e3
    return answer


async def _read_refusal(response: aiohttp.ClientResponse, answer: Answer) -> None:
    raw = await read_up_to(response, _MOST_REFUSAL_BYTES)
    try:
        told = error_words(read_json(raw))
    except ValueError:
        told = raw.decode("utf-8", "replace")
    answer.fail(f"http_{response.status}", told)


async def _read_stream(
    response: aiohttp.ClientResponse,
    arrival: Arrival,
    answer: Answer,
    sent: float,
    limit: asyncio.Timeout,
    stall_timeout_s: float,
) -> bool:
    """Whether the stream came to its ``[DONE]``."""
    clock, read, deadline = asyncio.get_running_loop().time, response.content.readany, limit.when() or 0.0
    reader, is_done, pieces, set_again_at = EventReader(), False, [], 0.0
    while received := await read():
        now_ms = round((arrival.came_s - sent) * 1e3, 3)
        for data in reader.feed(received):
            if data.strip() == b"[DONE]":
                is_done = True
                continue
            if (piece := _take(data, answer, now_ms)) is None:
                return True  # an error was noted, which says more than how the stream ends
            pieces.append(piece)
            if (now := clock()) >= set_again_at:
                set_again_at = now + _STALL_SLACK * stall_timeout_s
                limit.reschedule(min(deadline, set_again_at + stall_timeout_s))
    answer.text = "".join(pieces)
    return is_done


def _take(data: bytes, answer: Answer, now_ms: float) -> str | None:
    """Note what an event holds; returns its text, None where it is an error or cannot be read."""
    try:
        event = read_json(data)
    except ValueError:
        answer.fail("broken_stream", "an event is not JSON, or nested too deeply")
        return None
    if not isinstance(event, dict):
        answer.fail("broken_stream", "an event is no object")
        return None
    if not _RARE_FIELDS.isdisjoint(event):  # most events have none of them
        if event.get("error"):
            answer.fail("error_event", error_words(event))
            return None
        if isinstance(event.get("usage"), dict):
            answer.usage = event["usage"]
        for name in _ACCOUNTS:
            if isinstance(event.get(name), dict):
                answer.told[name] = event[name]
    text = ""
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        generated, reply = _text(choice)
        text += generated
        answer.reply += reply
        if isinstance(choice.get("meta_info"), dict):
            answer.told["meta_info"] = choice["meta_info"]
        if choice.get("finish_reason"):
            answer.finish_reason, answer.last_ms = str(choice["finish_reason"])[:_MOST_REASON_CHARS], now_ms
    if text:
        answer.chunk_ms.append(now_ms)
        answer.chunk_chars.append(len(text))
        answer.last_ms = now_ms
    return text


def _text(choice: dict[str, Any]) -> tuple[str, str]:
    """What was generated, and what of it is no thinking."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        text = choice["text"] if isinstance(choice.get("text"), str) else ""
        return text, text
    content = delta.get("content")
    reply = content if isinstance(content, str) else ""
    if len(delta) == 1 and reply:  # nearly all are so
        return reply, reply
    thoughts = "".join(delta[name] for name in _THOUGHTS if isinstance(delta.get(name), str))
    calls = delta.get("tool_calls")
    return thoughts + reply + (json.dumps(calls) if calls else ""), reply
