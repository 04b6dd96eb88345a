"""A real HTTP server whose timing and faults are known: what a measurement must find is what it was told to do."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

HANG_S = 60.0


@dataclass
class Behaviour:
    """How the server answers.

    Attributes:
        fault_of: which fault a request gets, from its number (from 0); None for a good answer.
        usage_factor: what usage is multiplied with in a good answer.
        is_native: play ddtree's own server: it tells its drafting, and takes variants.
    """

    first_s: float = 0.02
    gap_s: float = 0.01
    chunks: int = 12
    tokens_per_chunk: int = 3
    fault_of: Callable[[int], str | None] = lambda number: None
    usage_factor: float = 1.0
    is_native: bool = False
    model: str = "words"
    seen: Counter[str] = field(default_factory=Counter)
    most_at_once: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """The first chunk holds one token, the others ``tokens_per_chunk``."""
        return 1 + (self.chunks - 1) * self.tokens_per_chunk

    @property
    def tok_s(self) -> float:
        """What one answer reaches after its first token, but for the sleeps' own lateness."""
        return (self.tokens - 1) / ((self.chunks - 1) * self.gap_s)


class FaultServer:
    """The application of a :class:`Behaviour`."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self._number = 0
        self._now = 0
        routes = [
            Route("/v1/models", self._models),
            Route("/seen", self._seen),
            Route("/ready", self._ready),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/server_info", self._info),
            Route("/metrics", self._metrics),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)
        self._rounds = self._tokens = self._firsts = 0

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": self.behaviour.model}]})

    async def _ready(self, request: Request) -> Response:
        return JSONResponse({"ready": True, "stage": "ready", "progress": 1.0})

    async def _completion(self, request: Request) -> Response:
        usage = {"prompt_tokens": 3, "completion_tokens": 1}
        return JSONResponse({"choices": [{"text": "word", "finish_reason": "stop"}], "usage": usage})

    async def _seen(self, request: Request) -> Response:
        behaviour = self.behaviour
        return JSONResponse(
            {"answers": behaviour.seen, "most_at_once": behaviour.most_at_once, "bodies": behaviour.bodies}
        )

    async def _info(self, request: Request) -> Response:
        if not self.behaviour.is_native:
            return Response(status_code=404)
        facts = {"engine": {"dtype": "float32", "api_key": "sk-secret-of-the-server"}}
        return JSONResponse({"versions": {"ddtree": "0"}, "effective": facts})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            f'ddtree_rounds_total{{mode="tree",budget="8"}} {self._rounds}\n'
            f"ddtree_completion_tokens_total {self._tokens}\n"
            f"ddtree_time_to_first_token_seconds_count {self._firsts}\n"
        )

    async def _tokenize(self, request: Request) -> Response:
        if not self.behaviour.is_native:
            return Response(status_code=404)
        body = await request.json()
        text = body.get("text") or body["messages"][-1]["content"]
        return JSONResponse({"count": len(text.split()), "tokens": []})

    async def _chat(self, request: Request) -> Response:
        behaviour, number = self.behaviour, self._number
        self._number += 1
        body = await request.json()
        behaviour.bodies.append(body)
        if not body.get("stream"):
            usage = {"prompt_tokens": len(body["messages"][-1]["content"].split()), "completion_tokens": 1}
            return JSONResponse({"choices": [{"message": {"content": "w"}, "finish_reason": "stop"}], "usage": usage})
        fault = behaviour.fault_of(number)
        behaviour.seen[fault or "good"] += 1
        if fault == "refused":
            return JSONResponse({"error": {"message": "out of luck"}}, 500)
        return StreamingResponse(self._answer(body, fault), media_type="text/event-stream")

    async def _answer(self, body: dict[str, Any], fault: str | None) -> Any:
        behaviour, per_chunk = self.behaviour, self._per_chunk(body)
        self._now += 1
        behaviour.most_at_once = max(behaviour.most_at_once, self._now)
        try:
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            await asyncio.sleep(behaviour.first_s)
            for chunk in range(behaviour.chunks):
                if chunk:
                    await asyncio.sleep(behaviour.gap_s)
                if fault is not None and chunk == behaviour.chunks // 2:
                    if fault == "broken":
                        return
                    if fault == "cut":
                        raise ConnectionResetError  # uvicorn drops the connection
                    if fault == "hang":
                        await asyncio.sleep(HANG_S)
                    if fault == "drip":
                        for _ in range(int(HANG_S / 0.05)):
                            yield b": still here\n\n"
                            await asyncio.sleep(0.05)
                    if fault == "garbage":
                        yield b"data: {not json\n\n"
                    if fault == "error_event":
                        yield _event({"error": {"message": "gone wrong", "code": 500}})
                        return
                words = 1 if chunk == 0 else per_chunk
                yield _event({"choices": [{"index": 0, "delta": {"content": "word " * words}}]})
            yield self._last(fault, body)
            if fault != "no_usage":
                yield self._usage(fault, body)
            yield b"data: [DONE]\n\n"
        finally:
            self._now -= 1

    def _per_chunk(self, body: dict[str, Any]) -> int:
        is_plain = self.behaviour.is_native and body.get("ddtree", {}).get("mode") == "ar"
        return 1 if is_plain else self.behaviour.tokens_per_chunk

    def _last(self, fault: str | None, body: dict[str, Any]) -> bytes:
        reason = None if fault == "no_reason" else "stop"
        return _event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})

    def _usage(self, fault: str | None, body: dict[str, Any]) -> bytes:
        behaviour, per_chunk = self.behaviour, self._per_chunk(body)
        tokens = 1 + (behaviour.chunks - 1) * per_chunk
        told = {
            "too_many": tokens * 2,
            "too_few": tokens // 2,
            "absurd": 10**6,
            "negative": -1,
            "text": "36",
            "far_too_few": 2,
        }.get(fault or "", int(tokens * behaviour.usage_factor))
        content = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": told}}
        if behaviour.is_native:
            asked = body.get("ddtree", {})
            rounds = [per_chunk] * (behaviour.chunks - 1)
            self._rounds += len(rounds)
            self._tokens += tokens
            self._firsts += 1
            mode = "ar" if fault == "fell_back" else asked.get("mode", "tree")
            content["ddtree"] = {
                "mode": mode,
                "budget": asked.get("budget", 8),
                "accepted_lengths": rounds,
                "notes": [],
            }
        return _event(content)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """The server's URL, while it runs in a process of its own: the client's clock must not wait for its work."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(behaviour, listener), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        process.terminate()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
        listener.close()


def _serve(behaviour: Behaviour, listener: socket.socket) -> None:
    config = uvicorn.Config(
        FaultServer(behaviour).app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1
    )
    uvicorn.Server(config).run(sockets=[listener])


def seen(url: str) -> dict[str, Any]:
    """What the server has seen: answers by fault, the most requests at once, and the bodies."""
    return httpx.get(f"{url}/seen", trust_env=False).json()
