"""A real TCP server that answers with the bytes a test gives it, whatever HTTP says about them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ddtree.bench.answer import Answer, ask
from ddtree.bench.http_client import HttpClient

Answering = Callable[[bytes], AsyncIterator[bytes]]
"""From a request's head to what is written, piece by piece; the connection is kept where it ends."""

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
KEY = "sk-of-the-user"


def chunk(data: bytes) -> bytes:
    """A piece of a body in HTTP's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> bytes:
    """A chunk with one event of generated text."""
    return chunk(b'data: {"choices": [{"delta": {"content": "%b"}}]}\n\n' % text.encode())


DONE = chunk(b"data: [DONE]\n\n") + END


@dataclass
class RawServer:
    """What it has seen. ``now``: connections that are open."""

    port: int = 0
    connections: int = 0
    now: int = 0
    heads: list[bytes] = field(default_factory=list)
    sent_bytes: int = 0


@contextmanager
def raw_server(answering: Answering, tls: ssl.SSLContext | None = None) -> Iterator[RawServer]:
    """It runs in a thread of its own."""
    seen, loop = RawServer(), asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        seen.now += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                await reader.readexactly(sum(int(line[15:]) for line in lines if line.startswith(b"content-length:")))
                seen.heads.append(head)
                async for piece in answering(head):
                    writer.write(piece)
                    await writer.drain()
                    seen.sent_bytes += len(piece)
                    if reader.at_eof():
                        raise ConnectionResetError
        seen.now -= 1
        writer.close()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)

    async def stop() -> None:
        server.close()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    server = loop.run_until_complete(start())
    seen.port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def good(head: bytes) -> AsyncIterator[bytes]:
    """Two events and the end."""
    yield STREAM + event("one ")
    yield event("two") + DONE


def asked(
    server: RawServer,
    times: int = 1,
    request_timeout_s: float = 5.0,
    stall_timeout_s: float = 1.0,
    scheme: str = "http",
    proxy: bool = False,
) -> list[Answer]:
    """The answers to requests one after the other."""

    async def run() -> list[Answer]:
        url = f"{scheme}://127.0.0.1:{server.port}"
        async with HttpClient(url, KEY, uses_proxies=proxy) as client:
            return [
                await ask(client, f"{url}/v1/chat/completions", {"stream": True}, request_timeout_s, stall_timeout_s)
                for _ in range(times)
            ]

    return asyncio.run(run())
