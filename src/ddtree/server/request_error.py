"""From pydantic's findings, and from whatever else goes wrong, to OpenAI's error shape."""

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ddtree.errors import UserError
from ddtree.server.api_error import ApiError, from_user_error
from ddtree.server.messages import ROLES

log = logging.getLogger("ddtree.server")


def from_validation(findings: Sequence[Any]) -> ApiError:
    """The first finding, told with the place of the field."""
    found = findings[0]
    place = _place(found["loc"])
    if not place:
        return ApiError(400, "the body is not a JSON object", code="invalid_body")
    if found["type"] == "extra_forbidden":
        return ApiError(400, f"{place}: this server does not know this field", param=place, code="unknown_field")
    if found["type"] == "missing":
        return ApiError(400, f"{place}: this field is required", param=place, code="missing_field")
    if found["type"] in ("union_tag_invalid", "union_tag_not_found"):
        place += ".role"
        if found["type"] == "union_tag_not_found":
            return ApiError(400, f"{place}: this field is required", param=place, code="missing_field")
        return ApiError(
            400, f"{place}: choose one of {', '.join(sorted(ROLES))}", param=place, code="unsupported_value"
        )
    words = found["msg"].removeprefix("Value error, ")
    if found["type"] in ("literal_error", "none_required"):
        return ApiError(400, f"{place}: not supported ({words})", param=place, code="unsupported_value")
    return ApiError(400, f"{place}: {words}", param=place, code="invalid_value")


def _place(parts: Sequence[int | str]) -> str:
    place = ""
    for before, part in pairwise(parts):  # the first is where the field came from
        if isinstance(before, int) and part in ROLES:
            continue  # no field, but which kind of message it is
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else part
    return place


def to_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status_code, dict(error.headers or {}))


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Our own errors, and those of the framework: unknown paths and methods, bodies that cannot be read."""
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        told = ApiError(error.status_code, str(error.detail))
        told.headers = error.headers
        error = told
    return to_response(error)


async def on_user_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, UserError)
    return to_response(from_user_error(error))


async def on_fault(request: Request, error: Exception) -> JSONResponse:
    """A fault of ours. The log gets the traceback, the client gets no details."""
    log.error("a request failed", exc_info=error)
    return to_response(ApiError(500, "the server failed to answer; its log says more"))
