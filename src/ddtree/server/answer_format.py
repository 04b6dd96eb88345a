"""How answers are dressed: as chat completions or as text completions, whole or in chunks."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddtree.engine import Completion
from ddtree.server.job import Delta


class AnswerFormat(Protocol):
    """One of OpenAI's two dresses.

    Attributes:
        endpoint: path, for metrics.
        id: of the answer.
    """

    endpoint: str
    id: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a first chunk, where there is one before any text."""
        ...

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of a chunk."""
        ...

    def whole(self, index: int, completion: Completion) -> dict[str, Any]:
        """A choice that is finished."""
        ...

    def body(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        """The object around choices."""
        ...


@dataclass
class ChatFormat:
    """``/v1/chat/completions``"""

    model: str
    endpoint: str = "/v1/chat/completions"
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self, index: int) -> dict[str, Any] | None:
        return _chunk(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        reason = delta.completion.finish_reason if delta.completion else None
        return _chunk(index, {"content": delta.text} if delta.text or not reason else {}, reason)

    def whole(self, index: int, completion: Completion) -> dict[str, Any]:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": completion.finish_reason}

    def body(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _chunk(index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


@dataclass
class CompletionFormat:
    """``/v1/completions``; chunks look like whole answers."""

    model: str
    endpoint: str = "/v1/completions"
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        reason = delta.completion.finish_reason if delta.completion else None
        return {"index": index, "text": delta.text, "logprobs": None, "finish_reason": reason}

    def whole(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "text": completion.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
        }

    def body(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
