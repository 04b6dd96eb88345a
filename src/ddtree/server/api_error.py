"""Refusals and faults, in the shape that OpenAI clients read."""

from typing import Any

from starlette.exceptions import HTTPException

from ddtree.errors import UserError
from ddtree.models.tokenizer import TooManyTokens

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_LONGEST_MESSAGE = 500


class ApiError(HTTPException):
    """Ends a request.

    Args:
        status: HTTP status.
        message: what is wrong, for the client's author.
        param: the field at fault.
        code: a word for programs.
        retry_after_s: when to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        super().__init__(status, message, headers)
        self.message = message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + " ..."
        self.param, self.code = param and param[:_LONGEST_MESSAGE], code

    def body(self) -> dict[str, Any]:
        """The JSON that the client gets."""
        kind = _TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_PARAMS = {"max_new_tokens": "max_tokens", "mode": "ddtree.mode", "budget": "ddtree.budget"}
_PARAMS |= {"top_k_cap": "ddtree.top_k_cap", "a": "ddtree.budget"}  # "a chain of 9 is longer ..."


def from_user_error(error: UserError) -> ApiError:
    """The engine's refusal of a request; its cause begins with the name of what it refuses."""
    first = error.cause.split(" ", 1)[0]
    cause, remedy = error.cause, error.remedy
    if "max_new_tokens" in cause + remedy:
        cause, remedy = (text.replace("max_new_tokens", "max_tokens") for text in (cause, remedy))
    if cause.startswith("the prompt"):
        is_long = isinstance(error, TooManyTokens) or "the context" in cause
        return ApiError(
            400, f"{cause}: {remedy}", param="prompt", code="context_length_exceeded" if is_long else "invalid_prompt"
        )
    param = _PARAMS.get(first, first if first.isidentifier() and first != "the" else None)
    return ApiError(400, f"{cause}: {remedy}" if remedy else cause, param=param, code="invalid_value")
