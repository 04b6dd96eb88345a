"""A real HTTP server whose answers, and the log-probabilities with them, are chosen by the test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Tokens = list[tuple[str, float, list[tuple[str, float]]]]


@contextmanager
def answering(answer: Callable[[dict[str, Any]], Tokens | None], logprobs: bool = True) -> Iterator[str]:
    """Its URL. ``answer`` gives the tokens with their log-probabilities and alternatives, or None for an error."""

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "m"}]})

    async def info(request: Request) -> Response:
        return JSONResponse({"versions": {"ddtree": "0"}, "effective": {"engine": {"dtype": "bfloat16"}}})

    async def chat(request: Request) -> Response:
        body = await request.json()
        if body.get("logprobs") and not logprobs:
            return JSONResponse({"error": {"message": "no logprobs here"}}, 400)
        tokens = answer(body)
        if tokens is None:
            return JSONResponse({"error": {"message": "broken"}}, 500)
        choice: dict[str, Any] = {
            "message": {"content": "".join(text for text, _, _ in tokens)},
            "finish_reason": "stop",
        }
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [_entry(*token) for token in tokens]}
        return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": len(tokens)}})

    routes = [Route("/v1/models", models), Route("/server_info", info)]
    app = Starlette(routes=[*routes, Route("/v1/chat/completions", chat, methods=["POST"])])
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def _entry(text: str, logprob: float, others: list[tuple[str, float]]) -> dict[str, Any]:
    top = [{"token": token, "logprob": value, "bytes": None} for token, value in [(text, logprob), *others]]
    return {"token": text, "logprob": logprob, "bytes": None, "top_logprobs": top}
