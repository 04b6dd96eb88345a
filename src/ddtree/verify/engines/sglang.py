"""SGLang: `/server_info`, `/metrics` (with `--enable-metrics`), and `meta_info` of each response."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from ddtree.verify.answer import Answer, Order, Rounds
from ddtree.verify.effective import Counters, Effective
from ddtree.verify.engines.adapter import Adapter, NotOffered
from ddtree.verify.exposition import Exposition
from ddtree.verify.forced import Divergence, Forced
from ddtree.verify.http_client import Garbled, Refused

_DIRECT = {
    "block_size": "speculative_dflash_block_size",
    "draft_window": "speculative_draft_window_size",
    "model": "model_path",
    "drafter": "speculative_draft_model_path",
    "context_length": "context_length",
    "attention_backend": "attention_backend",
    "nvls": "enable_nccl_nvls",
    "memory_fraction": "mem_fraction_static",
    "tp": "tp_size",
    "ep": "ep_size",
    "pp": "pp_size",
    "dp": "dp_size",
    "dtype": "dtype",
}
_REVISIONS = {"model_revision": "revision", "drafter_revision": "speculative_draft_model_revision"}
_TREE = {
    "budget": "speculative_ddtree_budget",
    "top_k_cap": "speculative_ddtree_topk_cap",
    "draft_temperature": "speculative_ddtree_draft_temperature",
}


class SglangAdapter(Adapter):
    """Settings are the resolved ones of the scheduler (`internal_states`), where it tells them."""

    engine: ClassVar[str] = "sglang"
    _not_in_streams = ("return_meta_info",)

    def effective(self) -> Effective:
        info = self._info()
        states = info.get("internal_states")
        state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
        args = info | state  # the scheduler's own view wins over the front end's
        if "speculative_algorithm" not in args:
            raise Garbled("/server_info tells no speculative_algorithm")
        algorithm = str(args["speculative_algorithm"] or "none").lower()
        settings: dict[str, Any] = {name: args[key] for name, key in _DIRECT.items() if key in args}
        settings["algorithm"] = algorithm
        settings |= {name: args[key] for name, key in _REVISIONS.items() if args.get(key)}
        if args.get("device"):
            settings["device"] = str(args["device"])
        if algorithm == "none":
            settings = {name: value for name, value in settings.items() if name not in ("block_size", "draft_window")}
        else:
            width = args.get("speculative_num_draft_tokens")
            if width is not None:
                settings["budget"] = int(width) - 1
                if algorithm != "ddtree" and settings.get("block_size") is None:
                    settings["block_size"] = int(width)
            settings |= {name: args[key] for name, key in _TREE.items() if args.get(key) is not None}
            if settings.get("block_size") is None:
                settings.pop("block_size", None)
        if settings.get("context_length") is None:
            settings.pop("context_length", None)
        if isinstance(running := args.get("effective_max_running_requests_per_dp"), int):
            settings["max_running_requests"] = running
        if (graphs := _decode_graphs(args)) is not None:
            settings["cuda_graphs"] = graphs
        # The seed is drawn at random at every start unless it was set, so it names the process.
        seed = args.get("random_seed")
        return Effective(
            self.engine,
            args.get("version"),
            str(args.get("served_model_name") or args.get("model_path")),
            settings,
            "/server_info of the scheduler" if state else "/server_info",
            {"random_seed": str(seed)} if seed is not None else {},
            str(args.get("device") or "cuda"),
        )

    def counters(self) -> Counters:
        try:
            told = Exposition(self.http.get_text("/metrics", self.info_timeout_s))
        except Refused:
            return Counters()  # without --enable-metrics there are none
        passes = told.by_label("sglang:cuda_graph_passes_total", "mode")
        has_tokens = told.has("sglang:generation_tokens_total")
        return Counters(
            # The counter has no sample before its first call.
            verify_calls=told.total("sglang:spec_verify_calls_total") or (0.0 if has_tokens else None),
            completion_tokens=told.total("sglang:generation_tokens_total"),
            prompt_tokens=told.total("sglang:prompt_tokens_total"),
            graph_replays=passes.get("decode_cuda_graph", 0.0) if passes else None,
            eager_passes=passes.get("decode_none", 0.0) if passes else None,
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
        ids = answer.token_ids
        if ids is None:
            generated = self._generate({"input_ids": list(prompt)}, answer.completion_tokens)
            ids = tuple(int(each) for each in generated.get("output_ids") or ())
        body = {
            "input_ids": [*prompt, *ids],
            "return_logprob": True,
            "logprob_start_len": len(prompt) - 1,
            "top_logprobs_num": 1,
        }
        try:
            meta = self._generate(body, 1)["meta_info"]
        except Refused as error:
            raise NotOffered(f"log-probabilities of a prompt are refused here: {error}") from None
        try:
            own = [entry for entry in meta["input_token_logprobs"] if entry[0] is not None][-len(ids) :]
            tops = meta["input_top_logprobs"][-len(ids) :]
            pairs = [(entry, top[0]) for entry, top in zip(own, tops, strict=True)]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise Garbled(f"/generate told no log-probabilities of the prompt ({error})") from None
        divergences = tuple(
            Divergence(index, str(entry[1]), str(top[1]), float(top[0]) - float(entry[0]))
            for index, (entry, top) in enumerate(pairs)
            if entry[1] != top[1]
        )
        return Forced(len(pairs), divergences, "log-probabilities of prompt and answer from one prefill")

    def _info(self) -> dict[str, Any]:
        try:
            told = self.http.get_json("/server_info", self.info_timeout_s)
        except Refused as error:
            if error.status != 404:
                raise
            told = self.http.get_json("/get_server_info", self.info_timeout_s)  # its name before 0.5.5 or so
        if not isinstance(told, dict):
            raise Garbled("/server_info is no JSON object")
        return told

    def _generate(self, given: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        body = given | {"sampling_params": {"temperature": 0, "max_new_tokens": max_tokens}}
        told = self.http.post_json("/generate", body, self.answer_timeout_s)
        if not isinstance(told, dict):
            raise Garbled("/generate answered something that is no JSON object")
        return told

    def answer(self, order: Order, timeout_s: float | None = None) -> Answer:
        """Chats by OpenAI's API; bare text by `/generate`, which tells more."""
        if order.is_chat or order.top_logprobs:
            return super().answer(order, timeout_s)
        given = {"text": order.prompt} if isinstance(order.prompt, str) else {"input_ids": list(order.prompt)}
        body = given | {"sampling_params": {"temperature": 0, "max_new_tokens": order.max_tokens}}
        began = time.perf_counter()
        told = self.http.post_json("/generate", body, timeout_s or self.answer_timeout_s)
        seconds = time.perf_counter() - began
        try:
            meta = told["meta_info"]
            ids = told.get("output_ids")
            return Answer(
                told["text"],
                int(meta["prompt_tokens"]),
                int(meta["completion_tokens"]),
                seconds,
                _rounds_of(meta),
                tuple(int(each) for each in ids) if isinstance(ids, list) else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise Garbled(f"/generate did not answer in SGLang's shape ({type(error).__name__}: {error})") from None

    def _body(self, order: Order) -> tuple[str, dict[str, Any]]:
        path, body = super()._body(order)
        return path, body | ({"return_meta_info": True} if order.is_chat else {})

    def _rounds(self, told: dict[str, Any], choice: dict[str, Any]) -> Rounds | None:
        meta = choice.get("meta_info")
        return _rounds_of(meta) if isinstance(meta, dict) else None


def _decode_graphs(args: dict[str, Any]) -> bool | None:
    """Whether decoding is set to replay graphs: two flags say it, and each leaves the other's key as it was."""
    config = args.get("cuda_graph_config")
    decode = config.get("decode") if isinstance(config, dict) else None
    if isinstance(decode, dict) and "backend" in decode:
        return decode["backend"] != "disabled" and args.get("disable_cuda_graph") is not True
    disabled = args.get("disable_cuda_graph")
    return not disabled if isinstance(disabled, bool) else None


def _rounds_of(meta: dict[str, Any]) -> Rounds | None:
    """None where the response tells no verify calls, which it does not without speculation."""
    calls = meta.get("spec_verify_ct")
    if not calls:
        return None
    proposed = meta.get("spec_num_proposed_drafts", meta.get("spec_proposed_drafts"))
    budgets = (float(proposed) / calls,) if proposed is not None else ()
    return Rounds(int(calls), int(meta["completion_tokens"]), budgets)
