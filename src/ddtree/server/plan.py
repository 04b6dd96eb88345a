"""From a request's fields to what the engine shall do."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ddtree.engine import Engine, SamplingParams, Speculation
from ddtree.engine.sampling_params import MAX_SEED
from ddtree.errors import UserError
from ddtree.server.api_error import ApiError, from_user_error
from ddtree.server.grammar import Grammar
from ddtree.server.prompt_tokens import chat_tokens, check_template_for_tools, text_tokens
from ddtree.server.requests import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    DdtreeOptions,
    GenerationRequest,
    StreamOptions,
)
from ddtree.server.service import Service, Work
from ddtree.server.tools import NamedTool, Tool, tool_grammar

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for `/v1/completions`; chats go on to the end of the context."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Plan:
    """A request in the engine's words.

    Attributes:
        works: the sequences, those of one prompt next to each other.
        prompt_lengths: tokens of each prompt.
        stream, include_usage: how to answer; with running_usage every chunk tells the tokens so far.
        may_call: the answers may hold tool calls.
    """

    works: list[Work]
    prompt_lengths: list[int]
    stream: bool
    include_usage: bool
    running_usage: bool = False
    may_call: bool = False


async def plan_chat(service: Service, request: ChatRequest) -> Plan:
    """Raises ApiError where the request cannot be served."""
    engine = service.open_engine()
    check_model(service, request.model)
    limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
    if len(set(limits)) > 1:
        raise ApiError(400, "max_tokens and max_completion_tokens contradict each other", param="max_completion_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs true", param="top_logprobs", code="invalid_value")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    tools = _told_tools(engine, request)
    grammar = await (_tool_grammar(service, request, tools) if tools else _grammar(service, request))
    context = engine.state.max_model_len
    prompt = await chat_tokens(service, request.messages, request.chat_template_kwargs, tools, context)
    limit = limits[0] if limits else context
    return replace(_plan(engine, request, [prompt], limit, logprobs, grammar), may_call=bool(tools))


async def plan_completion(service: Service, request: CompletionRequest) -> Plan:
    """Raises ApiError where the request cannot be served."""
    engine = service.open_engine()
    check_model(service, request.model)
    context = engine.state.max_model_len
    prompts = [await text_tokens(service, p, context) if isinstance(p, str) else p for p in request.prompt]
    limit = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    return _plan(engine, request, prompts, limit, request.logprobs)


def _told_tools(engine: Engine, request: ChatRequest) -> list[Tool] | None:
    """The tools that the model is told of; with ``tool_choice`` none it is told of none."""
    choice = request.tool_choice
    if request.tools is None:
        for name, value in (("tool_choice", choice), ("parallel_tool_calls", request.parallel_tool_calls)):
            if value not in (None, "none"):
                raise ApiError(400, f"{name}: only with tools", param=name, code="invalid_value")
        return None
    if choice == "none":
        return None
    check_template_for_tools(engine, "tools")
    names = [tool.function.name for tool in request.tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two functions have the same name", param="tools", code="invalid_value")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise ApiError(400, "tool_choice: no tool has this name", param="tool_choice", code="invalid_value")
    for name, clashes in (
        ("response_format", request.response_format is not None and request.response_format.type != "text"),
        ("ignore_eos", bool(request.ignore_eos)),
    ):
        if clashes:
            raise ApiError(400, f"{name}: not together with tools", param=name, code="unsupported_value")
    return request.tools


async def _tool_grammar(service: Service, request: ChatRequest, tools: list[Tool]) -> Grammar:
    """Keeps calls in form: from the first token on where one must be made, else from the tag on."""
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    several = request.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    try:
        text = tool_grammar(tools, must_call=choice not in (None, "auto"), several=several)
        return await service.grammars.compiled(service.open_engine(), text)
    except UserError as error:
        raise ApiError(400, f"tools: {error}", param="tools", code="invalid_value") from None


def check_model(service: Service, name: str | None) -> None:
    """Refuse a request that is meant for another model."""
    if name is not None and name != service.settings.model_name:
        raise ApiError(
            404,
            f"there is no model {name[:100]!r} here: this server has {service.settings.model_name!r}",
            param="model",
            code="model_not_found",
        )


async def _grammar(service: Service, request: ChatRequest) -> Grammar | None:
    """What ``response_format`` asks for, compiled."""
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        if wanted is not None and wanted.json_schema is not None:
            raise ApiError(400, "response_format.json_schema: only with type json_schema", param="response_format")
        return None
    if request.ignore_eos:
        raise ApiError(400, "ignore_eos: an answer in a format ends where the format ends", param="ignore_eos")
    if (wanted.json_schema is None) == (wanted.type == "json_schema"):
        raise ApiError(
            400, "response_format.json_schema: give it with type json_schema, and only there", param="response_format"
        )
    schema = wanted.json_schema.json_schema if wanted.json_schema else {"type": "object"}
    try:
        return await service.grammars.json_schema(service.open_engine(), schema)
    except UserError as error:
        raise ApiError(400, str(error), param="response_format", code="invalid_value") from None


def _plan(
    engine: Engine,
    request: GenerationRequest,
    prompts: list[list[int]],
    max_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None = None,
) -> Plan:
    n = request.n or 1
    if n * len(prompts) > MAX_CHOICES:
        raise ApiError(400, f"n: {n * len(prompts)} answers, the limit is {MAX_CHOICES}", param="n")
    context = engine.state.max_model_len
    if (longest := max(map(len, prompts))) >= context:  # before the engine's thread has to look at every token
        told = f"the prompt has {longest} tokens, the context {context}: shorten it, or raise max_model_len"
        raise ApiError(400, told, param="prompt", code="context_length_exceeded")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options: only with stream true", param="stream_options", code="invalid_value")
    try:
        speculation = _speculation(engine, request.ddtree)
        works = [
            Work(prompt, _sampling(request, max_tokens, choice, logprobs), speculation, grammar)
            for prompt in prompts
            for choice in range(n)
        ]
    except UserError as error:
        raise from_user_error(error) from None
    options = request.stream_options or StreamOptions()
    if options.continuous_usage_stats and not options.include_usage:
        told = "stream_options.continuous_usage_stats: only with include_usage true"
        raise ApiError(400, told, param="stream_options.continuous_usage_stats", code="invalid_value")
    return Plan(
        works,
        [len(prompt) for prompt in prompts],
        bool(request.stream),
        bool(options.include_usage),
        bool(options.continuous_usage_stats),
    )


def _sampling(request: GenerationRequest, max_tokens: int, choice: int, logprobs: int | None) -> SamplingParams:
    """The sampling of one choice; those after the first draw with the seeds that follow."""
    seed = request.seed
    params = SamplingParams(
        max_new_tokens=max_tokens,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=_or(request.top_k, 0),
        min_p=_or(request.min_p, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        seed=seed,
        stop=tuple(request.stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logit_bias=_bias(request.logit_bias or {}),
        logprobs=logprobs,
    )
    return replace(params, seed=(seed + choice) % (MAX_SEED + 1)) if seed is not None and choice else params


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    """JSON has only strings for names; here they are token ids."""
    for name in given:
        if not (name.isascii() and name.isdecimal() and len(name) < 10 and str(int(name)) == name):
            raise ApiError(400, f"logit_bias: {name[:100]!r} is no token id", param="logit_bias", code="invalid_value")
    return {int(name): bias for name, bias in given.items()}


def _or(value: Result | None, default: Result) -> Result:
    return default if value is None else value


def _speculation(engine: Engine, options: DdtreeOptions | None) -> Speculation | None:
    """The engine's own where the request says nothing; a mode of its own starts from that mode's defaults."""
    if options is None:
        return None
    own = engine.speculation
    mode = options.mode or own.mode
    same = mode == own.mode
    return Speculation(
        mode,
        options.budget if options.budget is not None or not same else own.budget,
        options.top_k_cap if options.top_k_cap is not None or not same else own.top_k_cap,
    )
