"""Clients that cost little: many HTTP connections in one thread, bytes kept as they come and read when all is over.

A client that reads every event while others wait measures itself: at some thousand events a second it is busier than
the server. Here an event costs one `recv`; what it said is looked at after the end of the measurement.
"""

import json
import re
import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_END = b"\r\n0\r\n\r\n"
_IDLE_S = 2.0
"""A connection that was not used for so long is made anew: servers close idle ones."""
_FIRST_TEXT = re.compile(rb'"(?:content|text)":"[^"]')


@dataclass
class Reply:
    """One answer as it came.

    Attributes:
        began, first, ended: `time.perf_counter()` of the request, of the first piece of text, of the end.
        raw: status line, headers and body, as received.
        reads: how often something was there to read.
    """

    began: float
    first: float = 0.0
    ended: float = 0.0
    raw: bytes = b""
    reads: int = 0

    @property
    def status(self) -> int:
        return int(self.raw[9:12])

    @property
    def body(self) -> bytes:
        """Without the framing of chunks, where there is one."""
        head, _, rest = self.raw.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head.lower():
            return rest
        parts = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            parts.append(rest[:length])
            rest = rest[length + 2 :]
        return b"".join(parts)

    def events(self) -> list[dict[str, Any]]:
        """The JSON of a stream's events, `[DONE]` left out."""
        return [json.loads(event[6:]) for event in self.body.split(b"\n\n") if event.startswith(b"data: {")]


@dataclass
class _Line:
    """One connection and the answer that comes over it."""

    connection: socket.socket
    reply: Reply
    parts: list[bytes] = field(default_factory=list)
    tail: bytes = b""
    seen: bytes = b""
    expected: int = -1


class Crowd:
    """So many clients, each asking again when its answer is whole.

    Args:
        url: of the server.
        path: of the endpoint.
    """

    def __init__(self, url: str, concurrency: int, path: str = "/v1/chat/completions") -> None:
        parts = urlsplit(url)
        self._address, self._path = (parts.hostname or "127.0.0.1", parts.port or 80), path
        self._connections = [self._connect() for _ in range(concurrency)]
        self._used = time.monotonic()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, 60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        return connection

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *told: object) -> None:
        for connection in self._connections:
            connection.close()

    def ask(self, bodies: Iterable[dict[str, Any]], timeout_s: float = 600.0) -> list[Reply]:
        """All answers, in the order in which they ended; read them after the measurement.

        Raises:
            TimeoutError: nothing came for so long.
            ConnectionError: the server closed a connection in the middle of an answer.
        """
        todo = iter([self._request(body) for body in bodies])
        if time.monotonic() > self._used + _IDLE_S:
            for connection in self._connections:
                connection.close()
            self._connections = [self._connect() for _ in self._connections]
        done: list[Reply] = []
        with selectors.DefaultSelector() as selector:
            lines = 0
            for connection in self._connections:
                lines += self._next(selector, connection, todo)
            while lines:
                ready = selector.select(timeout_s)
                if not ready:
                    raise TimeoutError(f"no byte for {timeout_s:g} s")
                for key, _ in ready:
                    line: _Line = key.data
                    if _read(line):
                        done.append(line.reply)
                        selector.unregister(line.connection)
                        lines += self._next(selector, line.connection, todo) - 1
        self._used = time.monotonic()
        return done

    def _request(self, body: dict[str, Any]) -> bytes:
        raw = json.dumps(body).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw

    def _next(self, selector: selectors.BaseSelector, connection: socket.socket, todo: Iterable[bytes]) -> int:
        for request in todo:
            line = _Line(connection, Reply(time.perf_counter()))
            connection.setblocking(True)
            connection.sendall(request)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, line)
            return 1
        return 0


def _read(line: _Line) -> bool:
    """Take what is there; True where the answer is whole."""
    got = line.connection.recv(1 << 18)
    if not got:
        raise ConnectionError("the server closed the connection")
    reply = line.reply
    reply.reads += 1
    line.parts.append(got)
    if not reply.first:
        line.seen += got
        if _FIRST_TEXT.search(line.seen):
            reply.first = time.perf_counter()
        head, found, _ = line.seen.partition(b"\r\n\r\n")
        if found and line.expected < 0 and (length := re.search(rb"content-length: (\d+)", head.lower())):
            line.expected = len(head) + 4 + int(length[1])
    if line.expected >= 0:
        is_whole = sum(map(len, line.parts)) >= line.expected
    else:
        line.tail = (line.tail + got)[-len(_END) :]
        is_whole = line.tail == _END
    if is_whole:
        reply.ended = time.perf_counter()
        reply.first = reply.first or reply.ended
        reply.raw = b"".join(line.parts)
    return is_whole
