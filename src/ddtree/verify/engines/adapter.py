"""What every engine has: OpenAI's API. Adapters of engines add their own evidence."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from ddtree.verify.answer import Answer, Order, Rounds, Speed, TokenChance
from ddtree.verify.effective import Counters, Effective
from ddtree.verify.forced import Forced
from ddtree.verify.http_client import CheckFailed, Garbled, HttpClient


class NotOffered(CheckFailed):
    """The engine, or this configuration of it, does not give such evidence; says why."""


class Adapter:
    """Speaks to one server.

    Args:
        info_timeout_s, answer_timeout_s: limits for facts, and for one answer.

    Attributes:
        model_name: the name to ask for.
    """

    engine: ClassVar[str] = ""

    def __init__(self, http: HttpClient, model_name: str, info_timeout_s: float, answer_timeout_s: float) -> None:
        self.http, self.model_name = http, model_name
        self.info_timeout_s, self.answer_timeout_s = info_timeout_s, answer_timeout_s

    def effective(self) -> Effective:
        """The engine's own account of itself. Raises CheckFailed."""
        raise NotImplementedError

    def identity(self) -> dict[str, str]:
        """What tells this process from a later one; empty where nothing does. Raises CheckFailed."""
        return dict(self.effective().identity)

    def counters(self) -> Counters:
        """Totals now. Raises CheckFailed."""
        raise NotImplementedError

    def tokenize(self, order: Order) -> tuple[int, ...]:
        """Token ids of an order's prompt. Raises CheckFailed, NotOffered."""
        raise NotOffered(f"{self.engine} offers no tokens of a prompt")

    def force(self, prompt: tuple[int, ...], answer: Answer) -> Forced:
        """The answer held against the target along its own path. Raises CheckFailed, NotOffered."""
        raise NotOffered(f"{self.engine} offers no log-probabilities along a given answer")

    def answer(self, order: Order, timeout_s: float | None = None) -> Answer:
        """Ask and wait. Raises CheckFailed."""
        path, body = self._body(order)
        began = time.perf_counter()
        told = self.http.post_json(path, body, timeout_s or self.answer_timeout_s)
        seconds = time.perf_counter() - began
        try:
            (choice,) = told["choices"]
            text = choice["message"]["content"] if order.is_chat else choice["text"]
            usage = told["usage"]
            return Answer(
                text or "",
                int(usage["prompt_tokens"]),
                int(usage["completion_tokens"]),
                seconds,
                rounds=self._rounds(told, choice),
                token_ids=_ids(choice.get("token_ids")),
                chances=tuple(_chances(choice.get("logprobs"))),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise Garbled(f"{path} did not answer in OpenAI's shape ({type(error).__name__}: {error})") from None

    def speed(self, order: Order, timeout_s: float) -> Speed:
        """Stream an answer and time it from here. Raises CheckFailed."""
        path, body = self._body(order)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        for name in self._not_in_streams:
            body.pop(name, None)
        began = time.perf_counter()
        times: list[float] = []
        tokens = 0
        for now, event in self.http.events(path, body, timeout_s):
            if "error" in event:
                raise Garbled(f"the stream ended in an error: {event['error']}"[:300])
            try:
                if any(_piece(choice, order.is_chat) for choice in event.get("choices") or ()):
                    times.append(now)
                tokens = int((event.get("usage") or {}).get("completion_tokens", tokens))
            except (AttributeError, TypeError, ValueError, OverflowError):
                raise Garbled(f"{path} did not stream in OpenAI's shape") from None
        if len(times) < 2 or tokens < 2 or times[-1] <= times[0]:
            raise Garbled(f"the stream of {tokens} tokens came in {len(times)} pieces, too few to time")
        return Speed(1e3 * (times[0] - began), (tokens - 1) / (times[-1] - times[0]), tokens)

    _not_in_streams: ClassVar[tuple[str, ...]] = ()

    def _body(self, order: Order) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": self.model_name, "max_tokens": order.max_tokens, "temperature": 0}
        if order.is_chat:
            body["messages"] = [{"role": "user", "content": order.prompt}]
            if order.top_logprobs:
                body |= {"logprobs": True, "top_logprobs": order.top_logprobs}
            return "/v1/chat/completions", body
        body["prompt"] = order.prompt if isinstance(order.prompt, str) else list(order.prompt)
        if order.top_logprobs:
            body["logprobs"] = order.top_logprobs
        return "/v1/completions", body

    def _rounds(self, told: dict[str, Any], choice: dict[str, Any]) -> Rounds | None:
        return None


def _piece(choice: dict[str, Any], is_chat: bool) -> str:
    return str((choice.get("delta") or {}).get("content") or "") if is_chat else str(choice.get("text") or "")


def _ids(value: Any) -> tuple[int, ...] | None:
    return tuple(int(each) for each in value) if isinstance(value, list) else None


def _chances(told: Any) -> list[TokenChance]:
    """Either of OpenAI's two shapes."""
    if not isinstance(told, dict):
        return []
    if "content" in told:
        return [
            TokenChance(
                str(each["token"]),
                float(each["logprob"]),
                tuple((str(other["token"]), float(other["logprob"])) for other in each.get("top_logprobs") or ()),
            )
            for each in told["content"] or ()
        ]
    tops = told.get("top_logprobs") or [None] * len(told["tokens"])
    return [
        TokenChance(
            str(token),
            float(value),
            tuple(sorted(((str(k), float(v)) for k, v in (top or {}).items()), key=lambda pair: -pair[1])),
        )
        for token, value, top in zip(told["tokens"], told["token_logprobs"], tops, strict=True)
    ]
