"""What every request passes before a route sees it: the key, the limits of its body, and the count of its outcome."""

import asyncio
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ddtree.server.api_error import ApiError
from ddtree.server.request_error import to_response
from ddtree.server.service import Service
from ddtree.server.settings import is_loopback

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
"""Paths that need no key: probes, and the page, which holds nothing before it was given a key."""


class Gate:
    """ASGI middleware in plain form, so that it sees disconnects and does not buffer streams."""

    def __init__(self, app: ASGIApp, service: Callable[[], Service], paths: Callable[[], set[str]]) -> None:
        self._app, self._service, self._paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, status, began = self._service(), [0], time.perf_counter()

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        try:
            limited = _limited(scope, receive, service)
            _check_host(scope, service)
            _check_key(scope, service)
        except ApiError as error:
            await to_response(error)(scope, receive, noting_send)
        else:
            await self._app(scope, limited, noting_send)
        finally:
            path = scope["path"] if scope["path"] in self._paths() else "other"  # no names of the client's choosing
            service.metrics.requests.labels(path, str(status[0] or "none")).inc()
            service.metrics.request_s.labels(path).observe(time.perf_counter() - began)


def _check_host(scope: Scope, service: Service) -> None:
    """Where loopback alone keeps others out, a web page must not come in by a name of its own that leads here."""
    settings = service.settings
    if settings.api_keys or settings.insecure or scope["path"] in OPEN_PATHS:
        return
    told = next((value for name, value in scope["headers"] if name == b"host"), b"localhost").decode("latin-1")
    host = told.rsplit(":", 1)[0] if told.rsplit(":", 1)[-1].isdigit() else told
    if not is_loopback(host.strip("[]").lower().removesuffix(".")):
        raise ApiError(
            403,
            "without a key this server answers to localhost and 127.0.0.1 only, not to another Host: start it with "
            "--api-key-file FILE, or with --insecure",
            code="host_not_allowed",
        )


def _check_key(scope: Scope, service: Service) -> None:
    keys = service.settings.api_keys
    if not keys or scope["path"] in OPEN_PATHS:
        return
    shown = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    kind, _, key = shown.partition(b" ")
    if kind.lower() != b"bearer" or not keys.accept(key.strip()):
        raise ApiError(401, "show a key of this server: Authorization: Bearer KEY", code="invalid_api_key")


def _limited(scope: Scope, receive: Receive, service: Service) -> Receive:
    """``receive`` that gives up on bodies that are too large or take too long."""
    limit, time_s = service.settings.max_body_bytes, service.settings.client_timeout_s
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    told = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if not told.isdigit() or int(told[:20]) > limit:
        raise too_large
    seen, is_complete, deadline = 0, False, time.monotonic() + time_s

    async def limited() -> Message:
        nonlocal seen, is_complete
        if is_complete:
            return await receive()  # waits for the client to go away
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {time_s:g} s", code="body_timeout") from None
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if seen > limit:
                raise too_large
        return message

    return limited
