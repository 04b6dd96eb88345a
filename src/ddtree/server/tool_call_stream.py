"""Tells the tool calls of an answer from its text, as the text comes."""

import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

from ddtree.server.tools import CALL_ARGUMENTS, CALL_END, CALL_NAME, CALL_TAG


@dataclass
class ReadCall:
    """A call as far as it was read.

    Attributes:
        is_whole: its end was read.
    """

    name: str
    arguments: str = ""
    is_whole: bool = False
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def told(self) -> dict[str, Any]:
        """As messages have it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallStream:
    """Reads an answer that `ddtree.server.tools.tool_grammar` kept in form.

    Attributes:
        content: the text before the calls.
        calls: the calls; one that was cut off before its arguments is left out.
    """

    def __init__(self) -> None:
        self.content = ""
        self.calls: list[ReadCall] = []
        self._held = ""
        self._at: Literal["text", "name", "arguments", "between"] = "text"

    @property
    def is_whole(self) -> bool:
        """There are calls, and none is cut off."""
        return bool(self.calls) and self._at == "between"

    def push(self, piece: str, is_last: bool = False) -> list[dict[str, Any]]:
        """The next piece of the answer.

        Args:
            is_last: nothing follows, so that nothing is held back.

        Returns:
            what it makes certain, as OpenAI's deltas.
        """
        self._held += piece
        deltas: list[dict[str, Any]] = []
        while self._advance(deltas):
            pass
        if self._at == "text":
            self._say(self._take("" if is_last else CALL_TAG), deltas)
        elif self._at == "arguments":
            text = self._take(CALL_END)
            cut = "" if self._held.startswith(CALL_END[:3]) else self._held  # else it may be the arguments' own brace
            self._argue(text + cut if is_last else text, deltas)
        return deltas

    def _advance(self, deltas: list[dict[str, Any]]) -> bool:
        """Read up to the next mark; False where it has not come yet."""
        mark = {"name": CALL_ARGUMENTS, "arguments": CALL_END}.get(self._at, CALL_TAG)
        before, found, rest = self._held.partition(mark)
        if not found:
            return False
        self._held = rest
        if self._at == "text":
            self._say(before, deltas)
        elif self._at == "name":
            call = ReadCall(before.removeprefix(CALL_NAME))
            self.calls.append(call)
            deltas.append({"tool_calls": [{"index": len(self.calls) - 1, **call.told()}]})
        elif self._at == "arguments":
            self._argue(before, deltas)
            self.calls[-1].is_whole = True
        following: dict[str, Literal["name", "arguments", "between"]] = {"name": "arguments", "arguments": "between"}
        self._at = following.get(self._at, "name")
        return True

    def _take(self, mark: str) -> str:
        """What is held, but for what may be the beginning of ``mark``."""
        keep = next((n for n in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:n])), 0)
        end = len(self._held) - keep
        taken, self._held = self._held[:end], self._held[end:]
        return taken

    def _say(self, text: str, deltas: list[dict[str, Any]]) -> None:
        if text:
            self.content += text
            deltas.append({"content": text})

    def _argue(self, text: str, deltas: list[dict[str, Any]]) -> None:
        if text:
            self.calls[-1].arguments += text
            deltas.append({"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": text}}]})
