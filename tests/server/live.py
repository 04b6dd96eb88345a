"""Servers in this process: real sockets, real uvicorn, an event loop of their own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from ddtree import Engine, Speculation
from ddtree.engine.engine import Progress
from ddtree.server import ServerSettings, create_app
from ddtree.server.run import listen

Loader = Callable[[Progress], Engine]
MODEL = "tiny"


@dataclass
class Live:
    """A running server."""

    url: str
    app: FastAPI
    engine_ends: list[BaseException | None]

    @property
    def service(self):
        return self.app.state.service

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one metric, the sum over label sets where none is named."""
        from prometheus_client.parser import text_string_to_metric_families

        text = httpx.get(f"{self.url}/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def is_empty(self, within_s: float = 5.0) -> bool:
        """Whether nothing is left in it: no job, no sequence, no page taken."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            now = self.service.thread.engine.occupancy()
            if not self.service._jobs and (now.running, now.waiting, now.cache_tokens_used) == (0, 0, 0):
                return not self.service.thread._seats
            time.sleep(0.02)
        return False


def tiny_loader(folders: tuple[Path, Path], **options: Any) -> Loader:
    settings = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "max_batch": 4} | options
    settings.setdefault("speculation", Speculation("tree", 32))

    def load(tell: Progress) -> Engine:
        return Engine.load(*folders, on_progress=tell, **settings)

    return load


class Valve:
    """Holds up the engine's steps once it has warmed up."""

    def __init__(self, load: Loader) -> None:
        self._load, self._open = load, threading.Event()
        self._open.set()
        self.fault: Exception | None = None

    def __call__(self, tell: Progress) -> Engine:
        engine = self._load(tell)
        step = engine.step

        def held() -> list[Any]:
            self._open.wait(60)
            if self.fault is not None:
                fault, self.fault = self.fault, None
                raise fault
            return step()

        engine.step = held  # type: ignore[method-assign]
        return engine

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


def raw_request(body: bytes, content_length: int | None = None) -> bytes:
    """A request for ``/v1/completions`` as it goes over the wire."""
    length = len(body) if content_length is None else content_length
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    )
    return "\r\n".join((*head, "", "")).encode() + body


@contextmanager
def live(load: Loader, *, wait: bool = True, **settings: Any) -> Iterator[Live]:
    """A server on a free port; ``wait`` for it to be ready."""
    listener = listen("127.0.0.1", 0)
    ends: list[BaseException | None] = []
    app = create_app(ServerSettings(**{"model_name": MODEL} | settings), load, {"model": MODEL}, ends.append)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        deadline = time.monotonic() + 60
        while not server.started or (wait and httpx.get(f"{url}/ready").status_code != 200):
            assert thread.is_alive() and time.monotonic() < deadline, ends
            time.sleep(0.02)
        yield Live(url, app, ends)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
