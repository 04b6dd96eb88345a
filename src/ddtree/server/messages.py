"""Turns of a conversation, as requests bring them and as chat templates want them."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from ddtree.server.api_error import ApiError

MAX_PARTS = 1024
"""Parts of one message."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class Body(BaseModel):
    """Unknown fields and wrong types are refused: no string is taken for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(Body):
    """A piece of a message; text is the only kind that this server takes."""

    type: Literal["text"]
    text: str


def _joined(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Content = Annotated[
    list[TextPart],
    Field(max_length=MAX_PARTS, fail_fast=True),
    BeforeValidator(_joined),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "maxItems": MAX_PARTS,
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                },
            ]
        }
    ),
]


def _text(content: Sequence[TextPart]) -> str:
    return "".join(part.text for part in content)


class PlainMessage(Body):
    """What the system or the user says; ``developer`` is OpenAI's newer word for ``system``."""

    role: Literal["system", "developer", "user"]
    content: Content

    def for_template(self) -> Mapping[str, Any]:
        return {"role": "system" if self.role == "developer" else self.role, "content": _text(self.content)}


class CalledFunction(Body):
    """A function's name, and its arguments as JSON text."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: str


class ToolCall(Body):
    """A call that the assistant made."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Body):
    """What the model said: text, tool calls, or both."""

    role: Literal["assistant"]
    content: Content | None = None
    refusal: None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=128, fail_fast=True)] | None = None

    def for_template(self) -> Mapping[str, Any]:
        said = {"role": "assistant", "content": _text(self.content or [])}
        if self.tool_calls is None:
            return said
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": _arguments(c)}}
            for c in self.tool_calls
        ]
        return said | {"tool_calls": calls}


class ToolMessage(Body):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)]

    def for_template(self) -> Mapping[str, Any]:
        return {"role": "tool", "content": _text(self.content), "tool_call_id": self.tool_call_id}


Message = Annotated[PlainMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


def _arguments(call: ToolCall) -> dict[str, Any]:
    """As an object, which is what templates print."""
    try:
        found = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(
            400,
            f"messages: the arguments of tool call {call.id[:100]!r} are not the JSON of an object",
            param="messages",
            code="invalid_value",
        )
    return found


def check_turns(messages: Sequence[PlainMessage | AssistantMessage | ToolMessage]) -> None:
    """Refuse turns that say nothing, and answers of tools that nobody called.

    Raises:
        ApiError: 400 with the message at fault.
    """
    called: set[str] = set()
    for place, message in enumerate(messages):
        if isinstance(message, AssistantMessage):
            if message.content is None and message.tool_calls is None:
                where = f"messages[{place}].content"
                raise ApiError(400, f"{where}: give content, tool_calls or both", param=where, code="missing_field")
            called |= {call.id for call in message.tool_calls or ()}
        elif isinstance(message, ToolMessage) and message.tool_call_id not in called:
            where = f"messages[{place}].tool_call_id"
            raise ApiError(400, f"{where}: no message before it has this tool call", param=where, code="invalid_value")


def uses_tools(messages: Sequence[PlainMessage | AssistantMessage | ToolMessage]) -> bool:
    """Whether tools were called in the conversation so far."""
    return any(
        isinstance(m, ToolMessage) or (isinstance(m, AssistantMessage) and m.tool_calls is not None) for m in messages
    )
