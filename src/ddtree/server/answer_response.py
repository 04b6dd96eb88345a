"""Sends an answer, whole or as server-sent events, and gives it up when the client goes away."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ddtree.engine import Completion
from ddtree.server.answer_format import AnswerFormat
from ddtree.server.api_error import ApiError
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.order(self._plan.works, self._plan.stream) as answer:
            work = self._stream(answer, send) if self._plan.stream else self._whole(answer, send)
            sending = asyncio.create_task(work)
            leaving = asyncio.create_task(_until_gone(receive))
            try:
                await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
                if not sending.done():
                    raise ClientGone
                await sending
            except ClientGone:
                self._service.metrics.cancelled.labels(self._dress.endpoint).inc()
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _whole(self, answer: Answer, send: Send) -> None:
        await answer.begun()
        done: dict[int, Completion] = {}
        async for index, delta in self._deltas(answer):
            if delta.completion is not None:
                done[index] = delta.completion
        completions = [done[index] for index in sorted(done)]
        body = self._dress.body([self._dress.whole(*item) for item in enumerate(completions)], is_chunk=False)
        body |= {"usage": usage(self._plan.prompt_lengths, completions), "ddtree": ddtree_stats(completions)}
        raw = _json(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, {"type": "http.response.body", "body": raw})

    async def _stream(self, answer: Answer, send: Send) -> None:
        await answer.begun()
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        try:
            async for chunk in self._chunks(answer):
                await self._event(send, chunk)
        except ClientGone:
            raise
        except ApiError as error:
            await self._event(send, error.body())
        except Exception:
            log.exception("a stream failed")
            await self._event(send, ApiError(500, "the server failed to go on; its log says more").body())
        else:
            await self._send(send, {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await self._send(send, {"type": "http.response.body", "body": b""})

    async def _chunks(self, answer: Answer) -> AsyncIterator[dict[str, Any]]:
        """Openings, pieces as they come, and in the last chunk what the whole took."""
        dress, n = self._dress, len(answer.jobs)
        written = [0] * n
        for index in range(n):
            if choice := dress.opening(index):
                yield dress.body([choice], is_chunk=True) | self._usage_within(written)
        done: dict[int, Completion] = {}
        async for index, delta in self._deltas(answer):
            written[index] += len(delta.token_ids)
            if delta.completion is not None:
                done[index] = delta.completion
            # None where there is nothing to show yet: half a character, or what may become a stop string.
            for choice in dress.pieces(index, delta):
                chunk = dress.body([choice], is_chunk=True) | self._usage_within(written)
                if len(done) == n and choice["finish_reason"] and not self._plan.include_usage:
                    chunk["ddtree"] = ddtree_stats([done[i] for i in range(n)])
                yield chunk
        if self._plan.include_usage:
            completions = [done[i] for i in range(n)]
            told = {"usage": usage(self._plan.prompt_lengths, completions), "ddtree": ddtree_stats(completions)}
            yield dress.body([], is_chunk=True) | told

    def _usage_within(self, written: list[int]) -> dict[str, Any]:
        """The usage of a chunk that is not the last one."""
        if self._plan.running_usage:
            return {"usage": usage_so_far(self._plan.prompt_lengths, sum(written))}
        return {"usage": None} if self._plan.include_usage else {}

    async def _deltas(self, answer: Answer) -> AsyncIterator[tuple[int, Delta]]:
        """The answer's deltas; each prompt is counted when its first token comes, so that metrics and usage agree."""
        lengths = self._plan.prompt_lengths
        uncounted, choices = set(range(len(lengths))), len(answer.jobs) // len(lengths)
        async for index, delta in answer.deltas():
            if (prompt := index // choices) in uncounted:
                uncounted.remove(prompt)
                self._service.metrics.prompt_tokens.inc(lengths[prompt])
            yield index, delta

    async def _event(self, send: Send, content: dict[str, Any]) -> None:
        await self._send(
            send, {"type": "http.response.body", "body": b"data: " + _json(content) + b"\n\n", "more_body": True}
        )

    async def _send(self, send: Send, message: Message) -> None:
        """Send a piece; a client that takes nothing for too long is as good as gone."""
        try:
            async with asyncio.timeout(self._service.settings.client_timeout_s):
                await send(message)
        except TimeoutError:
            raise ClientGone from None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
