"""One streamed answer, read with the time of every event."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from ddtree.bench.endpoint import error_words
from ddtree.bench.sse import EventReader, EventTooLong

_TEXT_FIELDS = ("reasoning_content", "reasoning", "content")
"""Fields of a delta that hold generated text; servers name the thinking part in two ways."""


@dataclass
class Answer:
    """What came back for one request. Times are milliseconds since it was sent.

    Attributes:
        error_kind: None where the stream came to its proper end.
        text: all that was generated, in order.
        reply: of it, what belongs to the conversation: no thinking.
        told: the engine's own account of the drafting, where there is one.
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

    @property
    def ttft_ms(self) -> float | None:
        """Arrival of the first text."""
        return self.chunk_ms[0] if self.chunk_ms else None

    def fail(self, kind: str, text: str) -> None:
        """Note the first thing that went wrong."""
        if self.error_kind is None:
            self.error_kind, self.error_text = kind, " ".join(text.split())[:500]


async def ask(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], request_timeout_s: float, stall_timeout_s: float
) -> Answer:
    """Send ``body`` and read the stream to its end; whatever goes wrong is in the answer, nothing is raised.

    Args:
        request_timeout_s: longest time for all of it, the wait for the first event included.
        stall_timeout_s: longest time between events that carry data, once there was one.
    """
    answer = Answer()
    content = json.dumps(body).encode()
    loop = asyncio.get_running_loop()
    sent, began = time.perf_counter(), loop.time()
    try:
        async with asyncio.timeout(request_timeout_s) as limit:
            headers = {"content-type": "application/json", "accept": "text/event-stream"}
            async with client.stream("POST", url, content=content, headers=headers) as response:
                answer.http_status = response.status_code
                if response.status_code != httpx.codes.OK:
                    await _read_refusal(response, answer)
                elif await _read_stream(response, answer, sent, limit, began + request_timeout_s, stall_timeout_s):
                    pass
                else:
                    answer.fail("broken_stream", "the stream ended without [DONE]")
    except TimeoutError:
        if answer.chunk_ms and loop.time() < began + request_timeout_s - 0.001:
            answer.fail("stalled", f"nothing came for {stall_timeout_s:g} s")
        else:
            answer.fail("timeout", f"not done after {request_timeout_s:g} s")
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        answer.fail("no_connection", str(error) or type(error).__name__)
    except EventTooLong:
        answer.fail("broken_stream", "an event has no end")
    except httpx.HTTPError as error:
        answer.fail("broken_stream", f"{type(error).__name__}: {error}")
    answer.end_ms = (time.perf_counter() - sent) * 1e3
    return answer


async def _read_refusal(response: httpx.Response, answer: Answer) -> None:
    raw = await response.aread()
    try:
        words = error_words(json.loads(raw))
    except ValueError:
        words = raw[:300].decode("utf-8", "replace")
    answer.fail(f"http_{response.status_code}", words)


async def _read_stream(
    response: httpx.Response,
    answer: Answer,
    sent: float,
    limit: asyncio.Timeout,
    deadline: float,
    stall_timeout_s: float,
) -> bool:
    """Whether the stream came to its ``[DONE]``."""
    loop = asyncio.get_running_loop()
    reader, is_done, pieces = EventReader(), False, []
    async for received in response.aiter_raw():
        now_ms = (time.perf_counter() - sent) * 1e3
        for data in reader.feed(received):
            if data.strip() == b"[DONE]":
                is_done = True
                continue
            if (piece := _take(data, answer, now_ms)) is None:
                return True  # an error was noted, which says more than how the stream ends
            pieces.append(piece)
            limit.reschedule(min(deadline, loop.time() + stall_timeout_s))
    answer.text = "".join(pieces)
    return is_done


def _take(data: bytes, answer: Answer, now_ms: float) -> str | None:
    """Note what an event holds; returns its text, None where it is an error or cannot be read."""
    try:
        event = json.loads(data)
    except ValueError:
        answer.fail("broken_stream", "an event is not JSON")
        return None
    if not isinstance(event, dict):
        answer.fail("broken_stream", "an event is no object")
        return None
    if event.get("error"):
        answer.fail("error_event", error_words(event))
        return None
    if isinstance(event.get("usage"), dict):
        answer.usage = event["usage"]
    for name in ("ddtree", "meta_info", "metrics"):
        if isinstance(event.get(name), dict):
            answer.told[name] = event[name]
    text = ""
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if not isinstance(choice, dict):
            continue
        generated, reply = _text(choice)
        text += generated
        answer.reply += reply
        if isinstance(choice.get("meta_info"), dict):
            answer.told["meta_info"] = choice["meta_info"]
        if choice.get("finish_reason"):
            answer.finish_reason = str(choice["finish_reason"])
            answer.last_ms = round(now_ms, 3)
    if text:
        answer.chunk_ms.append(round(now_ms, 3))
        answer.chunk_chars.append(len(text))
        answer.last_ms = round(now_ms, 3)
    return text


def _text(choice: dict[str, Any]) -> tuple[str, str]:
    """What was generated, and what of it is no thinking."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        text = choice["text"] if isinstance(choice.get("text"), str) else ""
        return text, text
    generated = "".join(delta[name] for name in _TEXT_FIELDS if isinstance(delta.get(name), str))
    calls = delta.get("tool_calls")
    content = delta.get("content")
    return generated + (json.dumps(calls) if calls else ""), content if isinstance(content, str) else ""
