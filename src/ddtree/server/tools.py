"""Tools that a request offers: what the model is told of them, and the grammar that keeps its calls.

A call is text of the form that Hermes and Qwen models are trained on:

    <tool_call>
    {"name": "NAME", "arguments": ARGUMENTS}
    </tool_call>

"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from ddtree.errors import UserError
from ddtree.models.tokenizer import Tokenizer
from ddtree.server.grammar import json_grammar
from ddtree.server.messages import Body

MAX_TOOLS = 128
CALL_TAG = "<tool_call>"
CALL_NAME = '\n{"name": "'
CALL_ARGUMENTS = '", "arguments": '
CALL_END = "}\n</tool_call>"
"""Cannot stand inside arguments: JSON has no bare line break within a string, and no ``<`` outside of one."""

_NAME = r"^[A-Za-z0-9_-]{1,64}$"


class Function(Body):
    """A function that the model may call; its arguments keep the schema to the letter, also without ``strict``."""

    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> Mapping[str, Any]:
        given = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": given}


class NamedFunction(Body):
    name: Annotated[str, Field(pattern=_NAME)]


class NamedTool(Body):
    """The one function that shall be called."""

    type: Literal["function"]
    function: NamedFunction


def _choice(value: Any) -> Any:
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict):
        return NamedTool.model_validate(value)
    raise ValueError('give "none", "auto", "required", or {"type": "function", "function": {"name": ...}}')


ToolChoice = Annotated[
    Any,
    BeforeValidator(_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string", "pattern": _NAME}},
                            "required": ["name"],
                            "additionalProperties": False,
                        },
                    },
                    "required": ["type", "function"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]


def why_no_tools(tokenizer: Tokenizer) -> str | None:
    """Why the model's chat template cannot be used with tools; None where it can."""
    if "tools" not in tokenizer.template_variables:
        return "the model's chat template has no tools"
    template = tokenizer.chat_template
    if CALL_TAG not in template or '"arguments"' not in template or "<function=" in template:
        return f"the model's chat template writes calls in another form than {CALL_TAG} with JSON"
    if CALL_TAG not in tokenizer.decode(tokenizer.encode(CALL_TAG)):
        return f"{CALL_TAG} is a special token of this model, which is not part of its text"
    return None


def tool_grammar(tools: Sequence[Tool], *, must_call: bool, several: bool) -> str:
    """The grammar of an answer that may call ``tools``.

    Args:
        must_call: the answer is calls and nothing else; otherwise it is text, and may end with calls.
        several: more than one call may be made.

    Raises:
        UserError: the parameters of a tool are no schema, or none of an object.
    """
    grammars: list[dict[str, Any]] = []
    bodies = []
    for number, tool in enumerate(tools):
        schema = tool.function.parameters
        schema = {"properties": {}, "additionalProperties": False} if schema is None else schema
        schema = {"type": "object", **schema}
        if schema["type"] != "object":
            raise UserError(f"the parameters of {tool.function.name} are not of type object", "describe an object")
        (arguments,) = json.loads(json_grammar(schema))["grammars"]
        grammars.append(arguments | {"name": f"arguments_{number}"})
        begin = json.dumps(CALL_NAME + tool.function.name + CALL_ARGUMENTS)
        bodies.append(f"body_{number}: {begin} @arguments_{number} {json.dumps(CALL_END)}")
    more = r' ("\n" call)*' if several else ""
    start = ["start: call" + more]
    if not must_call:
        # Lazy: the text before a call ends at the first tag.
        start = ["start: begin body" + more + " | TEXT", r"TEXT: /(.|\n)*/", f'begin[lazy]: TEXT "{CALL_TAG}"']
    lines = ["%llguidance {}", *start, f'call: "{CALL_TAG}" body']
    lines += ["body: " + " | ".join(f"body_{number}" for number in range(len(tools))), *bodies]
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": "\n".join(lines)}, *grammars]})
