"""A web server whose faults can be chosen, and on top of it as much of the hub's HTTP interface as its library asks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Web(ThreadingHTTPServer):
    """Serves ``files`` (path to content), with ranges.

    ``cut_after`` closes the connection after so many bytes of an answer, ``cuts`` times (None: always). ``lies`` (path
    to content) is what is really sent instead, of the length that is promised: other bytes, or fewer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.lies: dict[str, bytes] = {}
        self.cut_after: int | None = None
        self.cuts: int | None = None
        self.sent_bytes = 0
        self.asked: list[tuple[str, str, str | None]] = []
        self.counting = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def headers_of(self, path: str) -> dict[str, str]:
        return {}

    def page(self, path: str) -> tuple[int, dict[str, Any]] | None:
        """A JSON page with its status; None where the path is a file."""
        return None


class Hub(Web):
    """One repository, ``owner/model``, whose branch ``main`` is at `COMMIT`. Files above 100 bytes are LFS files."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__()
        self.repo = files
        self.tells: dict[str, bytes] = dict(files)  # what the hashes are of
        for name, content in files.items():
            self.files[f"/owner/model/resolve/{COMMIT}/{name}"] = content

    def spoil(self, name: str, content: bytes) -> None:
        """Send other content than the repository tells of."""
        self.files[f"/owner/model/resolve/{COMMIT}/{name}"] = content

    def page(self, path: str) -> tuple[int, dict[str, Any]] | None:
        path = path.partition("?")[0]
        if not path.startswith("/api/models/"):
            return None
        if not path.startswith("/api/models/owner/model"):
            return 404, {"error": "Repository not found", "code": "RepoNotFound"}
        revision = unquote(path.rpartition("/revision/")[2]) if "/revision/" in path else "main"
        if revision not in ("main", COMMIT):
            return 404, {"error": f"Invalid rev id: {revision}", "code": "RevisionNotFound"}
        siblings = [self._sibling(name, content) for name, content in self.tells.items()]
        return 200, {
            "id": "owner/model",
            "modelId": "owner/model",
            "sha": COMMIT,
            "private": False,
            "siblings": siblings,
        }

    def _sibling(self, name: str, content: bytes) -> dict[str, Any]:
        told: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": _git_sha1(content)}
        if len(content) > 100:
            told["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return told

    def headers_of(self, path: str) -> dict[str, str]:
        name = path.rpartition(f"/resolve/{COMMIT}/")[2]
        content = self.tells.get(name)
        if content is None:
            return {"X-Error-Code": "EntryNotFound"}
        is_lfs = len(content) > 100
        etag = hashlib.sha256(content).hexdigest() if is_lfs else _git_sha1(content)
        return {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'} | (
            {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))} if is_lfs else {}
        )


class _Handler(BaseHTTPRequestHandler):
    server: Web
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        server, path = self.server, unquote(self.path)
        server.asked.append((self.command, path, self.headers.get("Range")))
        if (page := server.page(path)) is not None:
            headers = {"Content-Type": "application/json"}
            if code := page[1].pop("code", None):
                headers["X-Error-Code"] = code
            self._send(page[0], json.dumps(page[1]).encode(), headers, with_body)
            return
        content = server.files.get(path)
        if content is None:
            self._send(404, b"", server.headers_of(path), with_body)
            return
        start, end = self._range(len(content))
        if start >= len(content) and content:
            self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"}, with_body)
            return
        headers = server.headers_of(path) | {"Accept-Ranges": "bytes"}
        if self.headers.get("Range"):
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        self._send(206 if self.headers.get("Range") else 200, content[start : end + 1], headers, with_body)

    def _range(self, size: int) -> tuple[int, int]:
        asked = self.headers.get("Range")
        if not asked:
            return 0, size - 1
        low, _, high = asked.removeprefix("bytes=").partition("-")
        return int(low), min(int(high), size - 1) if high else size - 1

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        server = self.server
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not with_body:
            return
        if (lie := server.lies.get(unquote(self.path))) is not None and status == 200:
            body = lie
        with server.counting:
            is_cut = server.cut_after is not None and len(body) > server.cut_after and server.cuts != 0
            if is_cut and server.cuts is not None:
                server.cuts -= 1
        if is_cut:
            body = body[: server.cut_after]
            self.close_connection = True
        try:
            self.wfile.write(body)
        except OSError:
            return  # the client had enough
        with server.counting:
            server.sent_bytes += len(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


Server = TypeVar("Server", bound=Web)


@contextmanager
def running(server: Server) -> Iterator[Server]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
