"""How answers are dressed: as chat completions or as text completions, whole or in chunks."""

import secrets
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddtree.engine import Completion, TokenLogprob
from ddtree.models.tokenizer import Tokenizer
from ddtree.server.job import Delta
from ddtree.server.told_logprobs import chat_logprobs, completion_logprobs
from ddtree.server.tool_call_stream import ToolCallStream


class AnswerFormat(Protocol):
    """One of OpenAI's two dresses.

    Attributes:
        endpoint: path, for metrics.
        id: of the answer.
        is_plain: pieces of an answer are text and nothing else, until its last.
    """

    endpoint: str
    id: str

    @property
    def is_plain(self) -> bool: ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a first chunk, where there is one before any text."""
        ...

    def pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the chunks that a delta brings, often one; the last of an answer has its finish reason."""
        ...

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """The choice of a chunk in the middle of a plain answer."""
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
    may_call: bool = False
    endpoint: str = "/v1/chat/completions"
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _calls: defaultdict[int, ToolCallStream] = field(default_factory=lambda: defaultdict(ToolCallStream))

    @property
    def is_plain(self) -> bool:
        return not (self.tells_logprobs or self.may_call)

    def opening(self, index: int) -> dict[str, Any] | None:
        return _chat_choice(index, {"role": "assistant", "content": ""})

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return _chat_choice(index, {"content": text})

    def pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        done, calls = delta.completion, self._calls[index]
        if self.may_call:
            told = calls.push(delta.text, is_last=done is not None)
        else:
            told = [{"content": delta.text}] if delta.text else []
        if done is not None or (delta.logprobs and not told):
            told = told or [{}]
        choices = [_chat_choice(index, each) for each in told]
        if choices:
            choices[0]["logprobs"] = self._logprobs(delta.logprobs)
        if done is not None:
            choices[-1]["finish_reason"] = _reason(done, calls)
        return choices

    def whole(self, index: int, completion: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        calls = ToolCallStream()
        if self.may_call:
            calls.push(completion.text, is_last=True)
            message["content"] = calls.content
            if calls.calls:
                message |= {"content": calls.content or None, "tool_calls": [call.told() for call in calls.calls]}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": _reason(completion, calls),
        }

    def body(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _logprobs(self, told: list[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self.tokenizer, told) if self.tells_logprobs else None


def _chat_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _reason(completion: Completion, calls: ToolCallStream) -> str:
    """A call that was cut off, by a limit or a stop string, keeps the reason of the cut."""
    return "tool_calls" if calls.is_whole and completion.finish_reason == "stop" else completion.finish_reason


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

    @property
    def is_plain(self) -> bool:
        return not self.tells_logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        return self._choice(index, text, [], None)

    def pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        if delta.completion is None and not delta.text and not (delta.logprobs and self.tells_logprobs):
            return []
        reason = delta.completion.finish_reason if delta.completion else None
        return [self._choice(index, delta.text, delta.logprobs, reason)]

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
