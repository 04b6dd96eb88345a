"""Server-sent events as bytes; those of plain text are put together from pieces that are encoded once an answer."""

import json
import secrets
from typing import Any

from ddtree.server.answer_format import AnswerFormat

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
DONE = b"data: [DONE]\n\n"


def to_json(content: Any) -> bytes:
    """JSON in UTF-8; half of a character becomes a question mark."""
    return _ENCODER.encode(content).encode("utf-8", "replace")


def event(content: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + to_json(content) + b"\n\n"


class TextEvents:
    """Events of a piece of text each, all alike but for the text.

    Args:
        more: fields of every chunk beside the format's own.
    """

    def __init__(self, dress: AnswerFormat, more: dict[str, Any]) -> None:
        self._dress, self._more = dress, more
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def of(self, index: int, text: str) -> bytes:
        """The event that tells ``text`` of choice ``index``."""
        before, after = self._around.get(index) or self._learn(index)
        return before + to_json(text) + after

    def _learn(self, index: int) -> tuple[bytes, bytes]:
        mark = secrets.token_hex(16)
        chunk = self._dress.body([self._dress.text_choice(index, mark)], is_chunk=True) | self._more
        before, _, after = event(chunk).partition(to_json(mark))
        self._around[index] = before, after
        return before, after
