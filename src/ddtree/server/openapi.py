"""What `/openapi.json` says of answers and errors. Bodies of requests describe themselves, in `requests`."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """What went wrong.

    `param` is the field at fault, `code` a word for programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's shape of an error."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(ge=0)


class Usage(BaseModel):
    """Tokens; a prompt counts once however many answers it got."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: PromptTokensDetails


class DraftStats(BaseModel):
    """How the answers came about."""

    mode: Literal["ar", "chain", "tree"]
    budget: int | Literal["auto"]
    tau: float | None
    rounds: int
    rounds_by_choice: list[int]
    accepted_lengths: list[int]
    round_budgets: list[int]
    ttft_ms: float
    decode_tok_s: float
    notes: list[str]


class AnsweredFunction(BaseModel):
    name: str
    arguments: str


class AnsweredCall(BaseModel):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnsweredCall] = Field(default_factory=list)


class ChatChoice(BaseModel):
    index: int
    message: AnsweredMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    """An answer to a conversation. Streams send `chat.completion.chunk` objects as server-sent events."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    ddtree: DraftStats


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(BaseModel):
    """An answer to bare text. Streams send objects of the same kind as server-sent events."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    ddtree: DraftStats


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class Models(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(BaseModel):
    text: str


class Alive(BaseModel):
    status: Literal["alive"]


class Ready(BaseModel):
    ready: bool
    stage: str
    progress: float = Field(ge=0, le=1)


Told = dict[int | str, dict[str, Any]]

_REASONS = {
    400: "The request cannot be honoured.",
    401: "The server wants a key.",
    403: "Without a key, the server answers to names of its own machine only.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many answers run or wait.",
    500: "A fault of the server.",
    503: "The server is not ready, or the request took too long.",
}
OF_EVERY_ROUTE = (401, 403)
OF_BODIES = (400, 404, 408, 413, 415, 500, 503)
OF_ANSWERS = (*OF_BODIES, 429)


def errors(*statuses: int) -> Told:
    """Errors that a route answers with, all in one shape."""
    return {status: {"model": ErrorBody, "description": _REASONS[status]} for status in statuses}


def says(model: type[BaseModel]) -> Told:
    """An answer of one shape."""
    return {200: {"model": model}}


def streams(model: type[BaseModel]) -> Told:
    """A whole answer, or a stream of events."""
    return {200: {"model": model, "content": {"text/event-stream": {"schema": {"type": "string"}}}}}


KEY_SCHEME = {"key": {"type": "http", "scheme": "bearer", "description": "Where the server was started with a key."}}
