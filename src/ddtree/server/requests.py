"""Bodies of requests. A field that is not here is refused, and so is a value that this server cannot honour.

A field that is typed with a single value is one that OpenAI's API has and this server has not: only the value that asks
for nothing is let through. ``null`` stands for a field that was left out.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from ddtree.engine.logprobs import MAX_LOGPROBS
from ddtree.engine.sampling_params import MAX_SEED
from ddtree.engine.speculation import MAX_BUDGET, Mode
from ddtree.server.messages import Body, Message
from ddtree.server.tools import MAX_TOOLS, Tool, ToolChoice

MAX_CHOICES = 64
MAX_STOPS = 16
MAX_COMPLETION_LOGPROBS = 5
MAX_MESSAGES = 2048
MAX_DETOKENIZED = 2**18


def _told(**bounds: Any) -> Any:
    """Bounds that the engine keeps, for the OpenAPI document."""
    return Field(json_schema_extra=bounds)


_BIAS = {
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_one_or_many),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": 256},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": 256},
                    "maxItems": MAX_STOPS,
                },
            ]
        }
    ),
]


def _budget(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError("give a whole number, or auto")


Budget = Annotated[
    Any,
    BeforeValidator(_budget),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 1024}, {"const": "auto"}]}),
]


class StreamOptions(Body):
    """How a stream ends, and what its chunks tell on the way; the latter is vLLM's extension."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class DdtreeOptions(Body):
    """Our extension: how this request is drafted. None of it changes the text."""

    mode: Mode | None = None
    budget: Budget | None = None
    top_k_cap: Annotated[int, _told(minimum=1, maximum=MAX_BUDGET)] | None = None


class GenerationRequest(Body):
    """What both kinds of requests have."""

    model: str | None = None
    temperature: Annotated[float, _told(minimum=0, maximum=100)] | None = None
    top_p: Annotated[float, _told(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[int, _told(minimum=0)] | None = None
    min_p: Annotated[float, _told(minimum=0, maximum=1)] | None = None
    max_tokens: Annotated[int, _told(minimum=1)] | None = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[Annotated[int, _told(minimum=0)]], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, _told(minimum=0, maximum=MAX_SEED)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Annotated[float, _told(minimum=-2, maximum=2)] | None = None
    frequency_penalty: Annotated[float, _told(minimum=-2, maximum=2)] | None = None
    repetition_penalty: Annotated[float, _told(minimum=0.01, maximum=100)] | None = None
    logit_bias: Annotated[dict[str, float], _told(**_BIAS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ddtree: DdtreeOptions | None = None


def _not_a_number(value: Any) -> Any:
    """Python takes 0 for False."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError("Input should be false")
    return value


OnlyFalse = Annotated[Literal[False], BeforeValidator(_not_a_number)]


class JsonSchema(Body):
    """A schema that the answer keeps; always to the letter, also without ``strict``."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    description: None = None


class ResponseFormat(Body):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, _told(minimum=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    store: OnlyFalse | None = None
    service_tier: Literal["auto", "default"] | None = None


def _prompts(value: Any) -> Any:
    """One prompt or many, each text or token ids, as a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], str | list)):
        return [value]
    return value


def _text_or_ids(value: Any) -> Any:
    if isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    ):
        return value
    raise ValueError("give text, token ids, or a list of either")


_TOKEN = {"type": "integer", "minimum": 0}
_PROMPTS = {"minItems": 1, "maxItems": MAX_CHOICES}

PromptField = Annotated[
    list[Annotated[Any, BeforeValidator(_text_or_ids)]],
    Field(min_length=1, max_length=MAX_CHOICES),
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}} | _PROMPTS,
                {"type": "array", "items": _TOKEN, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": _TOKEN, "minItems": 1}} | _PROMPTS,
            ]
        }
    ),
]


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``"""

    prompt: PromptField
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    echo: OnlyFalse | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: None = None


class TokenizeRequest(Body):
    """``POST /tokenize``: bare text, or messages in the model's chat template."""

    model: str | None = None
    text: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """``POST /detokenize``"""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, _told(minimum=0)]], Field(max_length=MAX_DETOKENIZED, fail_fast=True)]
