"""vLLM: `/version`, `/v1/models`, `/metrics`, and log-probabilities of a prompt."""

from __future__ import annotations

from typing import Any, ClassVar

from ddtree.verify.answer import Answer, Order
from ddtree.verify.effective import Counters, Effective
from ddtree.verify.engines.adapter import Adapter, NotOffered
from ddtree.verify.exposition import Exposition
from ddtree.verify.forced import Divergence, Forced
from ddtree.verify.http_client import Garbled, Refused

_DRAFTS = "vllm:spec_decode_num_drafts"


class VllmAdapter(Adapter):
    """vLLM tells few settings over HTTP: what it does not tell stays unknown, unless the process is on this host."""

    engine: ClassVar[str] = "vllm"

    def effective(self) -> Effective:
        version = self.http.get_json("/version", self.info_timeout_s)
        models = self.http.get_json("/v1/models", self.info_timeout_s)
        told = self._metrics()
        try:
            entry = next(
                each for each in models["data"] if each["id"] == self.model_name and each.get("parent") is None
            )
            settings: dict[str, Any] = {"context_length": entry["max_model_len"], "model": entry["root"]}
        except (KeyError, TypeError, StopIteration) as error:
            raise Garbled(f"/v1/models does not list {self.model_name!r} ({error})") from None
        if told and not told.has(_DRAFTS):
            settings["algorithm"] = "none"  # these counters exist only where speculation is configured
        started = told.total("process_start_time_seconds")
        return Effective(
            self.engine,
            version.get("version") if isinstance(version, dict) else None,
            self.model_name,
            settings,
            "/v1/models and /metrics",
            {"process_start_time_seconds": f"{started:.2f}"} if started is not None else {},
        )

    def counters(self) -> Counters:
        told = self._metrics()
        is_speculative = told.has(_DRAFTS)
        return Counters(
            verify_calls=told.total(f"{_DRAFTS}_total") if is_speculative else 0.0 if told else None,
            proposed=told.total("vllm:spec_decode_num_draft_tokens_total"),
            accepted=told.total("vllm:spec_decode_num_accepted_tokens_total"),
            completion_tokens=told.total("vllm:generation_tokens_total"),
            prompt_tokens=told.total("vllm:prompt_tokens_total"),
        )

    def tokenize(self, order: Order) -> tuple[int, ...]:
        if isinstance(order.prompt, tuple):
            return order.prompt
        body: dict[str, Any] = {"model": self.model_name}
        body |= {"messages": [{"role": "user", "content": order.prompt}]} if order.is_chat else {"prompt": order.prompt}
        try:
            told = self.http.post_json("/tokenize", body, self.info_timeout_s)
            return tuple(int(token) for token in told["tokens"])
        except Refused as error:
            raise NotOffered(f"no tokens of a prompt: {error}") from None
        except (KeyError, TypeError, ValueError):
            raise Garbled("/tokenize answered without tokens") from None

    def force(self, prompt: tuple[int, ...], answer: Answer) -> Forced:
        if answer.token_ids is None:
            raise NotOffered("this version does not tell the token ids of an answer")
        body = {
            "model": self.model_name,
            "prompt": [*prompt, *answer.token_ids],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 1,
        }
        try:
            told = self.http.post_json("/v1/completions", body, self.answer_timeout_s)
        except Refused as error:
            raise NotOffered(f"log-probabilities of a prompt are refused here: {error}") from None
        try:
            entries = told["choices"][0]["prompt_logprobs"][len(prompt) :]
            divergences = []
            for index, (token, entry) in enumerate(zip(answer.token_ids, entries, strict=True)):
                top_id, top = min(entry.items(), key=lambda item: item[1]["rank"])
                if int(top_id) != token:
                    gap = float(top["logprob"]) - float(entry[str(token)]["logprob"])
                    divergences.append(Divergence(index, str(token), top_id, gap))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise Garbled(f"/v1/completions told no log-probabilities of the prompt ({error})") from None
        return Forced(len(entries), tuple(divergences), "log-probabilities of prompt and answer from one prefill")

    def _metrics(self) -> Exposition:
        return Exposition(self.http.get_text("/metrics", self.info_timeout_s))

    def _body(self, order: Order) -> tuple[str, dict[str, Any]]:
        path, body = super()._body(order)
        return path, body | {"return_token_ids": True}
