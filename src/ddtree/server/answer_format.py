"""How answers are dressed: as chat completions or as text completions, whole or in chunks."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddtree.engine import Completion, TokenLogprob
from ddtree.models.tokenizer import Tokenizer
from ddtree.server.job import Delta
from ddtree.server.told_logprobs import chat_logprobs, completion_logprobs


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
    tokenizer: Tokenizer
    tells_logprobs: bool
    endpoint: str = "/v1/chat/completions"
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        reason = delta.completion.finish_reason if delta.completion else None
        return {
            "index": index,
            "delta": {"content": delta.text} if delta.text or not reason else {},
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": reason,
        }

    def whole(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": completion.finish_reason,
        }

    def body(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _logprobs(self, told: list[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self.tokenizer, told) if self.tells_logprobs else None


@dataclass
class CompletionFormat:
    """``/v1/completions``; chunks look like whole answers."""

    model: str
    tokenizer: Tokenizer
    tells_logprobs: bool
    endpoint: str = "/v1/completions"
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: dict[int, int] = field(default_factory=dict)

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        reason = delta.completion.finish_reason if delta.completion else None
        return self._choice(index, delta.text, delta.logprobs, reason)

    def whole(self, index: int, completion: Completion) -> dict[str, Any]:
        return self._choice(index, completion.text, completion.logprobs, completion.finish_reason)

    def body(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, index: int, text: str, told: list[TokenLogprob], reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self.tells_logprobs:
            logprobs = completion_logprobs(self.tokenizer, told, self._offsets.get(index, 0))
            self._offsets[index] = self._offsets.get(index, 0) + sum(map(len, logprobs["tokens"]))
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
