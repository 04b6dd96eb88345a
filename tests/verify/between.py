"""HTTP servers between verify and an engine, or instead of one, that do what a proxy or a broken engine might."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

Answer = Callable[[str, str, bytes, dict[str, str]], tuple[int, bytes]]
"""Method, path, body and headers to status and content."""


@contextmanager
def serving(answer: Answer, *, drip_s: float = 0.0) -> Iterator[str]:
    """A server that answers by ``answer``; with ``drip_s`` it sends a byte at a time."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = answer(self.command, self.path, body, dict(self.headers))
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            try:
                if not drip_s:
                    self.wfile.write(content)
                for byte in content if drip_s else b"":
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    time.sleep(drip_s)
            except OSError:
                pass  # the client had enough

        do_GET = do_POST = _answer

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def passing(*urls: str) -> Answer:
    """Hands every request on, to each address in turn."""
    turn = iter(range(1 << 30))

    def answer(method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        url = urls[next(turn) % len(urls)]
        told = httpx.request(method, url + path, content=body, headers=_kept(headers), timeout=60)
        return told.status_code, told.content

    return answer


def replaying(url: str) -> Answer:
    """Hands pages on, and answers every completion with the first that it saw for such a request."""
    stored: dict[str, tuple[int, bytes]] = {}
    onward = passing(url)

    def answer(method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        if method != "POST" or "completions" not in path:
            return onward(method, path, body, headers)
        key = path + str(json.loads(body).get("stream", False))
        if key not in stored:
            stored[key] = onward(method, path, body, headers)
        return stored[key]

    return answer


def _kept(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() in ("content-type", "authorization")}
