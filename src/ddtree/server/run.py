"""Listen, serve, and end in order."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from ddtree.engine import Engine
from ddtree.engine.engine import Progress
from ddtree.errors import UserError
from ddtree.server.app import create_app
from ddtree.server.readiness import Readiness
from ddtree.server.settings import ServerSettings

_SEND_REST_S = 5.0
"""After the drain, connections get so much time to take what was written for them."""

_SWITCH_S = 100e-6
"""The event loop gives the interpreter away with each piece that it sends; an engine that is bound by its host does not
give it back by itself, and after Python's own 5 ms for each piece 64 streams wait for one another for seconds."""

Announce = Callable[[str], None]


def serve(
    settings: ServerSettings,
    load: Callable[[Progress], Engine],
    requested: dict[str, Any],
    announce: Announce = lambda line: None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until the engine ends.

    Args:
        load: makes the engine, called in the engine's thread once the address is taken.
        requested: the engine's options as they were given, for ``/server_info``.
        announce: told what a person at the terminal wants to know.

    Raises:
        UserError: the address cannot be had, or `load` raised one.
        Exception: the engine failed for good.
    """
    listener = listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    announce(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")
    failures: list[BaseException] = []

    def on_end(error: BaseException | None) -> None:
        if error is not None:
            failures.append(error)
            server.should_exit = True

    def load_for_good(tell: Progress) -> Engine:
        engine = load(tell)
        tell("warming up", 0.0)  # loading ends with a stage that is called ready
        # What was made so far stays to the end. Looking for garbage among it stops all threads for 0.2 s, again and
        # again, and that in the middle of streams.
        gc.collect()
        gc.freeze()
        return engine

    sys.setswitchinterval(_SWITCH_S)
    app = create_app(settings, load_for_good, requested, on_end)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # paths and addresses are the operator's proxy's to log
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=int(settings.drain_s + _SEND_REST_S) + 1,
    )
    server = _Server(config, app, announce)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with listener:
        server.run(sockets=[listener])
    if failures:
        raise failures[0]


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        UserError: the address is taken, or is none of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host} port {port} ({error.strerror or error})", "choose another --host or --port"
        ) from None
    # Connections inherit it. asyncio would set it on sockets of its own making only, and without it the second of two
    # writes waits up to 40 ms for the client to acknowledge the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _Server(uvicorn.Server):
    """uvicorn, but a signal first lets running requests end, and the process then exits with 0."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, announce: Announce) -> None:
        super().__init__(config)
        self._app, self._announce = app, announce
        self._stage: Readiness | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, without raising the signal once more at the end."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: tell the terminal of new stages."""
        now: Readiness = self._app.state.service.readiness
        if self._stage is None or (now.is_ready, now.stage) != (self._stage.is_ready, self._stage.stage):
            self._announce(now.stage)
            self._stage = now
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, let those that run end, then end the connections."""
        service = self._app.state.service
        if service.unfinished:
            self._announce(f"ending: {service.unfinished} answers get up to {service.settings.drain_s:g} s")
        draining = asyncio.create_task(service.drain())
        try:
            await super().shutdown(sockets)
        finally:
            draining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await draining
