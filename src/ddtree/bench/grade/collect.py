"""Asks one side for an answer, with the log-probabilities that tell near-ties from faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddtree.bench.account import drafting
from ddtree.bench.answer import Answer
from ddtree.bench.endpoint import Endpoint, error_words
from ddtree.bench.grade.parting import Chance
from ddtree.bench.http_client import OK, HttpFailed
from ddtree.bench.record import Variant
from ddtree.bench.told import count, number

TOP_LOGPROBS = 5
_UNREAD = (AttributeError, IndexError, KeyError, TypeError, ValueError)


@dataclass
class Side:
    """A server, and how it is asked to draft."""

    name: str
    endpoint: Endpoint
    variant: Variant
    tells_logprobs: bool = True


@dataclass
class Collected:
    """``error`` is empty where an answer came; ``is_gone``: there was no server to ask."""

    error: str = ""
    is_gone: bool = False
    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int | None = None
    tau: float | None = None
    chances: list[Chance] | None = field(default=None)


async def collect(side: Side, prompt: str, max_tokens: int, timeout_s: float) -> Collected:
    """One greedy answer. Where the server refuses log-probabilities, it is asked again without, from then on always."""
    body: dict[str, Any] = {
        "model": side.endpoint.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        **side.variant.body(),
    }
    if side.tells_logprobs:
        asked = body | {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        collected, status = await _post(side, asked, timeout_s)
        if status not in (400, 422, 501):
            return collected
        plain, _ = await _post(side, body, timeout_s)
        if not plain.error:
            side.tells_logprobs = False
        return plain
    return (await _post(side, body, timeout_s))[0]


async def _post(side: Side, body: dict[str, Any], timeout_s: float) -> tuple[Collected, int]:
    url = f"{side.endpoint.url}/v1/chat/completions"
    try:
        answer = await side.endpoint.client.post(url, body, timeout_s)
        told = answer.json()
    except HttpFailed as error:
        return Collected(error=str(error), is_gone=error.is_gone), 0
    except ValueError as error:
        return Collected(error=f"{type(error).__name__}: {error}"), 0
    if answer.status != OK:
        return Collected(error=f"{answer.status}: {side.endpoint.client.words(error_words(told))}"), answer.status
    try:
        return _read(told), answer.status
    except _UNREAD as error:
        why = side.endpoint.client.words(repr(error))
        return Collected(error=f"the answer has not OpenAI's shape ({why})"), answer.status


def _read(told: dict[str, Any]) -> Collected:
    choice = told["choices"][0]
    own = drafting(Answer(told={name: told[name] for name in ("ddtree", "meta_info", "metrics") if told.get(name)}))
    text = choice["message"]["content"]
    if not isinstance(text, str | None):
        raise TypeError("content is no text")
    reason = choice.get("finish_reason")
    return Collected(
        text=text or "",
        finish_reason=str(reason) if reason else None,
        completion_tokens=count(told["usage"]["completion_tokens"]),
        tau=own.tau,
        chances=_chances(choice),
    )


def _chances(choice: dict[str, Any]) -> list[Chance] | None:
    """None where none are told, or not such as can be compared. An alternative without chance is none."""
    try:
        return [
            Chance(
                token=token["token"],
                logprob=number(token["logprob"]),
                top=[
                    (other["token"], number(other["logprob"]))
                    for other in token["top_logprobs"]
                    if other["logprob"] is not None
                ],
            )
            for token in choice["logprobs"]["content"]
        ] or None
    except _UNREAD:
        return None
