"""From text to tokens and back; all but short texts beside the event loop, so that they hold up nobody's streams."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

from ddtree.engine import Engine
from ddtree.errors import UserError
from ddtree.server.api_error import ApiError, from_user_error
from ddtree.server.messages import Message, check_turns, uses_tools
from ddtree.server.service import Service
from ddtree.server.tools import Tool, why_no_tools

SHORT_TEXT = 1024
"""Characters or tokens; shorter texts take less than 0.3 ms, about what asking a thread takes."""
LONG_TEXT = 32768
"""Characters or tokens; longer texts wait for each other, so that however many come, they keep one core busy."""
COUNTED_TOKENS = 2**17
"""Texts that are only counted may be so long even where the context is shorter."""

_PER_TURN = 128
"""Characters of content that a turn's share of the template costs as much as."""

Result = TypeVar("Result")


class _Here:
    """On the event loop itself."""


_HERE = _Here()


async def text_tokens(service: Service, text: str, context: int, param: str = "prompt") -> list[int]:
    """Raw text as tokens.

    Args:
        context: refuse texts that are far longer.
    """
    return await _tokens(service, text, context, param, is_chat=False)


async def chat_tokens(
    service: Service,
    messages: list[Message],
    template_kwargs: dict[str, Any] | None,
    tools: list[Tool] | None,
    context: int,
) -> list[int]:
    """Messages in the model's chat template.

    Args:
        tools: that the template tells the model of.
        context: as in `text_tokens`.
    """
    engine = service.open_engine()
    tokenizer = engine.tokenizer
    check_turns(messages)
    if uses_tools(messages):
        check_template_for_tools(engine, "messages")
    told: list[Mapping[str, Any]] = [message.for_template() for message in messages]
    extra = dict(template_kwargs or {})
    for name in sorted(extra.keys() - (tokenizer.template_variables - {"tools"})) if extra else ():
        raise ApiError(
            400,
            f"chat_template_kwargs.{name}: the model's chat template has no such variable",
            param=f"chat_template_kwargs.{name}",
            code="unknown_field",
        )
    if tools:
        check_template_for_tools(engine, "tools")
        extra["tools"] = [tool.for_template() for tool in tools]
    size = sum(_PER_TURN + len(turn["content"]) for turn in told)
    is_short = size <= SHORT_TEXT and not extra and not uses_tools(messages)
    lane = _HERE if is_short else None
    text = await _done(lane, lambda: tokenizer.chat_text(told, extra), "messages")
    return await _tokens(service, text, context, "messages", is_chat=True)


async def tokens_text(service: Service, tokens: list[int]) -> str:
    """The text of tokens, special ones by their names."""
    tokenizer = service.open_engine().tokenizer
    lane = _lane(service, len(tokens))
    return await _done(lane, lambda: tokenizer.decode(tokens, skip_special_tokens=False), "tokens")


def check_template_for_tools(engine: Engine, param: str) -> None:
    """Refuse tools where the model's chat template has no place for them."""
    if reason := why_no_tools(engine.tokenizer):
        raise ApiError(400, f"{param}: tools cannot be used, as {reason}", param=param, code="unsupported_value")


async def _tokens(service: Service, text: str, context: int, param: str, *, is_chat: bool) -> list[int]:
    tokenizer = service.open_engine().tokenizer
    lane = _lane(service, len(text))
    return await _done(lane, lambda: tokenizer.encode(text, is_chat=is_chat, context=context), param)


def _lane(service: Service, length: int) -> "Executor | _Here | None":
    if length <= SHORT_TEXT:
        return _HERE
    return service.long_texts if length > LONG_TEXT else None


async def _done(lane: "Executor | _Here | None", work: Callable[[], Result], param: str) -> Result:
    """Do it here, in a thread of ``lane``, or in one of the event loop's own."""
    try:
        if isinstance(lane, _Here):
            return work()
        return await asyncio.get_running_loop().run_in_executor(lane, work)
    except UserError as error:
        is_long = from_user_error(error).code == "context_length_exceeded"
        code = "context_length_exceeded" if is_long else "invalid_value"
        raise ApiError(400, str(error), param=param, code=code) from None
