"""HTTP with an end: every request has a deadline for its whole answer, and says in which way it failed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx

MOST_BYTES = 64 * 2**20
_CONNECT_S = 10.0


class CheckFailed(Exception):
    """A request brought no answer that can be judged; the text says why, in one line."""


class Unreachable(CheckFailed):
    """No connection, or it broke."""


class Hung(CheckFailed):
    """Connected, but the whole answer was not there in time."""


class KeyRefused(CheckFailed):
    """401 or 403."""


class Refused(CheckFailed):
    """Another status than 200.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Garbled(CheckFailed):
    """An answer that is not what the endpoint promises."""


class HttpClient:
    """Requests to one server. Safe to use from several threads.

    Args:
        url: base address, without a path that belongs to the API.
        key: shown as a bearer token; never part of a message.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # The machine that is verified is the one that is named: no proxy of the environment may answer for it.
        self._client = httpx.Client(
            headers=headers,
            trust_env=False,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=128, max_keepalive_connections=0),
        )

    def close(self) -> None:
        self._client.close()

    def get_json(self, path: str, timeout_s: float) -> Any:
        """Raises CheckFailed."""
        return self._parsed(path, self._read("GET", path, None, timeout_s))

    def get_text(self, path: str, timeout_s: float) -> str:
        """Raises CheckFailed."""
        return self._read("GET", path, None, timeout_s).decode("utf-8", "replace")

    def post_json(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:
        """Raises CheckFailed."""
        return self._parsed(path, self._read("POST", path, body, timeout_s))

    def status(self, path: str, timeout_s: float) -> int | None:
        """The status that a path answers with; None where there is no answer."""
        try:
            self._read("GET", path, None, timeout_s)
        except Refused as error:
            return error.status
        except KeyRefused:
            return 401
        except CheckFailed:
            return None
        return 200

    def events(self, path: str, body: dict[str, Any], timeout_s: float) -> Iterator[tuple[float, dict[str, Any]]]:
        """Server-sent events as they come, with the time of each (`time.perf_counter`). Raises CheckFailed."""
        pending = b""
        for piece in self._pieces("POST", path, body, timeout_s):
            now = time.perf_counter()
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    event = self._parsed(path, line[5:])
                    if not isinstance(event, dict):
                        raise Garbled(f"{path} streamed something that is no JSON object")
                    yield now, event

    def _read(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> bytes:
        return b"".join(self._pieces(method, path, body, timeout_s))

    def _pieces(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Iterator[bytes]:
        deadline = time.monotonic() + timeout_s
        timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s))
        late = Hung(f"{method} {path} was not answered within {timeout_s:g} s")
        size = 0
        try:
            with self._client.stream(method, self.url + path, json=body, timeout=timeout) as response:
                if response.status_code != httpx.codes.OK:
                    raise _failure(method, path, response, deadline)
                for piece in response.iter_bytes():
                    size += len(piece)
                    if time.monotonic() > deadline:  # a server that drips would reset every other time limit
                        raise late
                    if size > MOST_BYTES:
                        raise Garbled(f"{method} {path} answered more than {MOST_BYTES >> 20} MiB")
                    yield piece
        except httpx.ConnectTimeout:
            raise Unreachable(f"{self.url} took no connection within {_CONNECT_S:g} s") from None
        except httpx.TimeoutException:
            raise late from None
        except httpx.ConnectError as error:
            raise Unreachable(f"{self.url} takes no connection ({error})") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(f"the connection broke in {method} {path} ({error or type(error).__name__})") from None

    def _parsed(self, path: str, raw: bytes) -> Any:
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise Garbled(f"{path} did not answer with JSON") from None


def _failure(method: str, path: str, response: httpx.Response, deadline: float) -> CheckFailed:
    """The answer's own words, where it has any."""
    status = response.status_code
    words = ""
    for piece in response.iter_bytes():
        words += piece.decode("utf-8", "replace")
        if len(words) > 2000 or time.monotonic() > deadline:
            break
    try:
        told = json.loads(words)
        error = told.get("error", told) if isinstance(told, dict) else told
        words = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, RecursionError):
        pass
    words = " ".join(words.split())[:200]
    text = f"{method} {path} answered {status}" + (f" ({words})" if words else "")
    return KeyRefused(text) if status in (401, 403) else Refused(text, status)
