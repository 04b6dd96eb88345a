"""The HTTP client that measures: aiohttp with kept connections that know when their bytes came."""

from __future__ import annotations

import socket
import ssl
import time
from base64 import b64encode
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass
from weakref import WeakValueDictionary

import aiohttp
import httpx
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError

from ddtree.bench.told import read_json, words
from ddtree.errors import UserError

OK = 200
FAILURES = (aiohttp.ClientError, HttpProcessingError, OSError)
"""All that a request can end with but for a cancellation; a TimeoutError is an OSError."""

_NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_CONNECT_TIMEOUT_S = 30.0
_KEPT_S = 3.0
"""Idle connections are left after this, before servers close theirs (uvicorn after 5 s): a request that meets the
closing would be lost."""
_MOST_BYTES = 64 * 2**20
_receive = socket.socket.recv


class HttpFailed(Exception):
    """No whole answer came. ``is_gone``: there was not even a connection."""

    def __init__(self, words: str, is_gone: bool = False) -> None:
        super().__init__(words)
        self.is_gone = is_gone


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Its content.

        Raises:
            ValueError: it is not JSON, or nested too deeply.
        """
        return read_json(self.body)


class Arrival(Protocol):
    """Where a stream's bytes come from. ``came_s``: when the last of them did, on ``time.perf_counter``'s clock."""

    @property
    def came_s(self) -> float: ...


class HttpClient:
    """Connections to one server; an async context manager.

    There is no limit on connections, which would queue requests where nobody sees it. Redirects are not followed,
    cookies not kept, and nothing is decompressed: a compressed answer fails.

    Args:
        url: the server's address; the way to it (TLS, proxy) is settled once, for all requests.
        uses_proxies: whether to go through the proxy that the environment names for ``url``.

    Raises:
        UserError: no header can carry the key, or the environment names a proxy or certificates that cannot be used.
    """

    def __init__(self, url: str, api_key: str | None, uses_proxies: bool) -> None:
        self.key = api_key.removeprefix("\ufeff") if api_key else None  # some editors begin files with it
        if self.key and not self.key.isprintable():
            raise UserError("the API key holds characters that a header cannot carry", "write it as one line of text")
        # The key goes with each request: a session's own headers reach the proxy too.
        self._headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {self.key}"} if self.key else {})
        self._way: dict[str, Any] = {"allow_redirects": False}
        proxy = _proxy_of(url) if uses_proxies else None
        self._is_tls = is_tls = urlsplit(url).scheme == "https"
        if proxy:
            self._way["proxy"], who = _without_password(proxy)
            if who and is_tls:
                self._way["proxy_headers"] = {"proxy-authorization": who}
            elif who:
                self._headers["proxy-authorization"] = who
        # httpx's certificates, so that all of ddtree trusts the same: SSL_CERT_FILE, SSL_CERT_DIR, else certifi's.
        needs_certificates = is_tls or urlsplit(proxy or "").scheme == "https"
        self._tls: ssl.SSLContext | bool = _tls_context() if needs_certificates else True
        self._stream_headers = self._headers | {"content-type": "application/json", "accept": "text/event-stream"}
        self._sockets: WeakValueDictionary[int, _TimedSocket] = WeakValueDictionary()

    async def __aenter__(self) -> HttpClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEPT_S, ssl=self._tls, socket_factory=self._new_socket
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # few bytes can become gigabytes, and the loop waits for them
            response_class=_Response,
            trust_env=False,  # else it asks for proxies and passwords anew, in a thread, for each request
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, url: str, timeout_s: float) -> Reply:
        """A whole answer.

        Raises:
            HttpFailed: none came in time.
        """
        return await self._whole("GET", url, None, timeout_s)

    async def post(self, url: str, body: dict[str, Any], timeout_s: float) -> Reply:
        """The same as :meth:`get`, to a request with ``body`` as JSON."""
        return await self._whole("POST", url, body, timeout_s)

    def stream(self, url: str, content: bytes) -> Any:
        """An async context manager of the ``aiohttp.ClientResponse`` to JSON that is written already.

        Any of :data:`FAILURES` may come from it; it has no time limit but for connecting.
        """
        return self._session.post(url, data=content, headers=self._stream_headers, **self._way)

    def arrival(self, response: aiohttp.ClientResponse) -> Arrival:
        """Tells when the bytes of ``response`` came.

        A response that came whole in one read has left its connection already; its time is that of asking. So is that
        on a loop that reads past Python's sockets, such as uvloop's.
        """
        transport = response.connection.transport if response.connection else None
        told = transport.get_extra_info("socket") if transport else None
        found = self._sockets.get(told.fileno()) if told else None
        return found if found is not None and found.came_s else _Now()

    def words(self, text: str) -> str:
        """``text`` of a server or about it as it may be shown and stored: one line, short, without the key."""
        return words(text, self.key)

    def failed(self, error: BaseException) -> HttpFailed:
        """One of :data:`FAILURES` in words, without what the request held."""
        told = self.words(str(error))  # never its repr, which shows headers, and so the key
        if isinstance(error, TimeoutError) and not told and self._is_tls:
            told = "no answer in time; see whether the port is one for https, not for http"
        elif isinstance(error, TimeoutError) and not told:
            told = "no answer in time"
        if isinstance(error, _NOT_CONNECTED):
            return HttpFailed(told or type(error).__name__, is_gone=True)
        return HttpFailed(f"{type(error).__name__}: {told}" if told else type(error).__name__)

    async def _whole(self, method: str, url: str, body: Any, timeout_s: float) -> Reply:
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(
                method, url, json=body, headers=self._headers, timeout=limit, **self._way
            ) as response:
                received = await read_up_to(response, _MOST_BYTES)
                if len(received) > _MOST_BYTES:
                    raise HttpFailed(f"the answer has more than {_MOST_BYTES >> 20} MiB")
                return Reply(response.status, received)
        except FAILURES as error:
            raise self.failed(error) from None

    def _new_socket(self, address: tuple[Any, ...]) -> socket.socket:
        made = _TimedSocket(*address[:3])
        self._sockets[made.fileno()] = made
        return made


def is_address(url: str) -> bool:
    """Whether ``url`` names a host as hosts can be named, and a port that there can be."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # what asking for its address does
        return bool(host.strip(b".")) and parts.port != 0
    except ValueError:  # such as a bracket without its other
        return False


async def read_up_to(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """The body; of one with more than ``most_bytes``, the first part, which is longer than that by less than a read."""
    received = bytearray()
    async for part in response.content.iter_any():
        received += part
        if len(received) > most_bytes:
            break
    return bytes(received)


class _TimedSocket(socket.socket):
    """Notes when bytes come into the process, before TLS, HTTP or any other request's work."""

    came_s = 0.0

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        received = _receive(self, size, flags)
        self.came_s = time.perf_counter()
        return received

    def recv_into(self, *args: Any) -> int:  # what asyncio calls under TLS
        count = super().recv_into(*args)
        self.came_s = time.perf_counter()
        return count


class _Response(aiohttp.ClientResponse):
    """Refuses what would pass for an answer and is none of this request's, or has another form than was asked for."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        # Called at once after sending: what is there already was read before, with the answer to the last request.
        protocol = connection.protocol
        if protocol is not None and protocol.is_connected() and protocol.should_close:
            raise aiohttp.ClientPayloadError("the server sent more on this connection than it was asked for")
        await super().start(connection)
        if (coding := self.headers.get("content-encoding", "identity").lower()) != "identity":
            raise aiohttp.ClientPayloadError(f"the answer is coded as {coding}, and identity was asked for")
        return self


class _Now:
    @property
    def came_s(self) -> float:
        return time.perf_counter()


def _proxy_of(url: str) -> str | None:
    """The proxy that the environment (on macOS, the system) names for ``url``."""
    parts, named = urlsplit(url), getproxies()
    proxy = named.get(parts.scheme) or named.get("all")
    if not proxy or proxy_bypass(parts.netloc):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if not is_address(proxy):
        raise UserError("the environment names a proxy that is no address", "write it as http://host:port")
    scheme = urlsplit(proxy).scheme
    if scheme not in ("http", "https"):
        raise UserError(f"a proxy of the kind {scheme} is set in the environment", "use an HTTP proxy, or set NO_PROXY")
    return proxy


def _tls_context() -> ssl.SSLContext:
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise UserError(
            f"the certificates that SSL_CERT_FILE or SSL_CERT_DIR names cannot be read ({error.strerror or error})",
            "name a file of certificates in PEM form, or unset both",
        ) from None


def _without_password(proxy: str) -> tuple[str, str | None]:
    """The proxy's address as it may stand in an error, and the header that says who we are there."""
    parts = urlsplit(proxy)
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    if parts.username is None:
        return address, None
    who = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return address, f"Basic {b64encode(who.encode()).decode()}"
