"""Sends an answer, whole or as server-sent events, and gives it up when the client goes away."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ddtree.engine import Completion
from ddtree.server.answer_format import AnswerFormat
from ddtree.server.api_error import ApiError
from ddtree.server.events import DONE, TextEvents, event, to_json
from ddtree.server.job import Delta
from ddtree.server.plan import Plan
from ddtree.server.report import ddtree_stats, usage, usage_so_far
from ddtree.server.service import Answer, Service

log = logging.getLogger("ddtree.server")
_STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"))


class ClientGone(Exception):
    """It left, or has not taken a piece of its answer for too long."""


class AnswerResponse(Response):
    """Orders the plan's sequences when it is sent.

    Errors before the first token, such as a full queue, still become a status of their own; those that come later end
    the stream with an event that holds OpenAI's error object.
    """

    def __init__(self, service: Service, plan: Plan, dress: AnswerFormat) -> None:
        super().__init__()
        self._service, self._plan, self._dress = service, plan, dress
        self._uncounted = set(range(len(plan.prompt_lengths)))
        self._sends_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.order(self._plan.works, self._plan.stream) as answer:
            work = self._stream(answer, send) if self._plan.stream else self._whole(answer, send)
            sending = asyncio.create_task(work)
            leaving = asyncio.create_task(_until_gone(receive))
            try:
                while not sending.done():
                    if leaving.done() or self._patience_s() <= 0:
                        raise ClientGone
                    await asyncio.wait(
                        (sending, leaving), timeout=self._patience_s(), return_when=asyncio.FIRST_COMPLETED
                    )
                await sending
            except ClientGone:
                self._service.metrics.cancelled.labels(self._dress.endpoint).inc()
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await asyncio.gather(sending, leaving, return_exceptions=True)

    def _patience_s(self) -> float:
        """How long a piece that is being sent may still take; a client that takes nothing is as good as gone."""
        limit = self._service.settings.client_timeout_s
        return limit if self._sends_since is None else self._sends_since + limit - time.monotonic()

    async def _whole(self, answer: Answer, send: Send) -> None:
        await answer.begun()
        done: dict[int, Completion] = {}
        while news := await self._news(answer):
            done |= {index: delta.completion for index, delta in news if delta.completion is not None}
        completions = [done[index] for index in sorted(done)]
        body = self._dress.body([self._dress.whole(*item) for item in enumerate(completions)], is_chunk=False)
        body |= {"usage": usage(self._plan.prompt_lengths, completions), "ddtree": ddtree_stats(completions)}
        raw = to_json(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, {"type": "http.response.body", "body": raw})

    async def _stream(self, answer: Answer, send: Send) -> None:
        await answer.begun()
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        try:
            async for events in self._events(answer):
                await self._send(send, {"type": "http.response.body", "body": events, "more_body": True})
            last = DONE
        except ApiError as error:
            last = event(error.body())
        except Exception:
            log.exception("a stream failed")
            last = event(ApiError(500, "the server failed to go on; its log says more").body())
        await self._send(send, {"type": "http.response.body", "body": last})

    async def _events(self, answer: Answer) -> AsyncIterator[bytes]:
        """Openings, pieces as they come, and in the last chunk what the whole took; all that is there goes at once."""
        dress, plan, n = self._dress, self._plan, len(answer.jobs)
        written, done = [0] * n, dict[int, Completion]()
        is_plain = dress.is_plain and not plan.running_usage
        texts = TextEvents(dress, self._usage_within(written))
        openings = (dress.opening(index) for index in range(n))
        ready = [event(dress.body([each], is_chunk=True) | self._usage_within(written)) for each in openings if each]
        if ready:
            yield b"".join(ready)
        while news := await self._news(answer):
            ready = []
            for index, delta in news:
                if is_plain and delta.completion is None:
                    if delta.text:  # else half a character, or what may become a stop string
                        ready.append(texts.of(index, delta.text))
                    continue
                written[index] += len(delta.token_ids)
                if delta.completion is not None:
                    done[index] = delta.completion
                for choice in dress.pieces(index, delta):
                    chunk = dress.body([choice], is_chunk=True) | self._usage_within(written)
                    if len(done) == n and choice["finish_reason"] and not plan.include_usage:
                        chunk["ddtree"] = ddtree_stats([done[i] for i in range(n)])
                    ready.append(event(chunk))
            if len(done) == n and plan.include_usage:
                completions = [done[i] for i in range(n)]
                told = {"usage": usage(plan.prompt_lengths, completions), "ddtree": ddtree_stats(completions)}
                ready.append(event(dress.body([], is_chunk=True) | told))
            if ready:
                yield b"".join(ready)

    def _usage_within(self, written: list[int]) -> dict[str, Any]:
        """The usage of a chunk that is not the last one."""
        if self._plan.running_usage:
            return {"usage": usage_so_far(self._plan.prompt_lengths, sum(written))}
        return {"usage": None} if self._plan.include_usage else {}

    async def _news(self, answer: Answer) -> list[tuple[int, Delta]]:
        """The answer's news; each prompt is counted when its first token comes, so that metrics and usage agree."""
        news = await answer.news()
        if self._uncounted:
            choices = len(answer.jobs) // len(self._plan.prompt_lengths)
            for prompt in self._uncounted & {index // choices for index, _ in news}:
                self._uncounted.remove(prompt)
                self._service.metrics.prompt_tokens.inc(self._plan.prompt_lengths[prompt])
        return news

    async def _send(self, send: Send, message: Message) -> None:
        """Send a piece; `_patience_s` sees to it that this ends."""
        self._sends_since = time.monotonic()
        await send(message)
        self._sends_since = None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
