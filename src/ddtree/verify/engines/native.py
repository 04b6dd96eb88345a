"""The `ddtree serve` of this package."""

from __future__ import annotations

from typing import Any, ClassVar

from ddtree.verify.answer import Answer, Order, Rounds
from ddtree.verify.effective import Counters, Effective
from ddtree.verify.engines.adapter import Adapter
from ddtree.verify.exposition import Exposition
from ddtree.verify.forced import Divergence, Forced
from ddtree.verify.http_client import Garbled

_MODES = {"tree": "ddtree", "chain": "dflash", "ar": "none"}
_REQUESTED = ("budget", "top_k_cap", "block_size", "draft_window", "draft_temperature", "max_model_len")
_IDENTITY = ("boot_id", "pid", "started_unix_s", "invocation")
_TOP = 5
_MOST_DIVERGENCES = 16


class NativeAdapter(Adapter):
    """Facts from `/server_info`, counters from `/metrics`, rounds from the responses' own `ddtree` field."""

    engine: ClassVar[str] = "native"

    def effective(self) -> Effective:
        info = self.http.get_json("/server_info", self.info_timeout_s)
        try:
            engine, rounds = info["effective"]["engine"], info["effective"]["rounds"]
            if engine is None:
                raise Garbled(f"the engine is not loaded: {info.get('stage')}")
            process = info.get("process") or {}
            settings: dict[str, Any] = {
                "algorithm": _MODES.get(engine["mode"], engine["mode"]),
                "block_size": engine["block_size"],
                "draft_window": engine["draft_window"],
                "model": engine["model"],
                "drafter": engine["draft"],
                "model_config_sha256": engine["model_config_sha256"],
                "drafter_config_sha256": engine["draft_config_sha256"],
                "context_length": engine["max_model_len"],
                "dtype": engine["dtype"],
                "exact": engine["exact"],
                "device": str(engine["device"]).split(":")[0],
                "cuda_graphs": rounds["launch"] == "cuda graph",
                "max_running_requests": info["effective"]["max_batch"],
                "tp": 1,
                "ep": 1,
                "pp": 1,
                "dp": 1,
            }
            settings |= {name: engine[name] for name in ("memory_fraction", "threads") if name in engine}
            if engine["mode"] != "ar":
                settings |= {"budget": engine["budget"], "top_k_cap": engine["top_k_cap"]}
            if engine.get("draft_temperature") is not None:
                settings["draft_temperature"] = engine["draft_temperature"]
            asked = (info.get("requested") or {}).get("engine") or {}
            return Effective(
                self.engine,
                (info.get("versions") or {}).get("ddtree"),
                str(info["model_name"]),
                settings,
                "/server_info, effective",
                {name: str(process[name]) for name in _IDENTITY if process.get(name) is not None},
                str(engine["device"]).split(":")[0],
                {_renamed(name): asked[name] for name in _REQUESTED if asked.get(name) is not None},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise Garbled(f"/server_info lacks what this version of ddtree tells ({error})") from None

    def counters(self) -> Counters:
        told = Exposition(self.http.get_text("/metrics", self.info_timeout_s))
        by_budget = told.by_label("ddtree_rounds_total", "budget")
        rounds = (self.http.get_json("/server_info", self.info_timeout_s).get("effective") or {}).get("rounds") or {}
        is_graph = rounds.get("launch") == "cuda graph"
        total = sum(by_budget.values())
        return Counters(
            verify_calls=sum(value for budget, value in by_budget.items() if budget not in ("0", "")),
            proposed=sum(float(budget) * value for budget, value in by_budget.items() if budget.isdigit()),
            completion_tokens=told.total("ddtree_completion_tokens_total"),
            prompt_tokens=told.total("ddtree_prompt_tokens_total"),
            graph_replays=rounds.get("graph_replays"),
            eager_passes=0.0 if is_graph else total,
        )

    def tokenize(self, order: Order) -> tuple[int, ...]:
        if order.is_chat:
            body: dict[str, Any] = {"messages": [{"role": "user", "content": order.prompt}]}
        elif isinstance(order.prompt, str):
            body = {"text": order.prompt}
        else:
            return order.prompt
        told = self.http.post_json("/tokenize", body, self.info_timeout_s)
        try:
            return tuple(int(token) for token in told["tokens"])
        except (KeyError, TypeError, ValueError):
            raise Garbled("/tokenize answered without tokens") from None

    def force(self, prompt: tuple[int, ...], answer: Answer) -> Forced:
        """By plain decoding from every place where the two part: the server can decode one request in mode `ar`."""
        method = "plain decoding (mode ar) along the answer"
        written = [chance.text for chance in answer.chances]
        ids: tuple[int, ...] | None = None
        divergences: list[Divergence] = []
        done = 0
        while done < len(written):
            if done and ids is None:
                ids = self._ids_of(written)
                if ids is None:
                    cut = "the answer's text has more than one spelling in tokens"
                    return Forced(done, tuple(divergences), method, cut)
            start = (*prompt, *(ids[:done] if ids else ()))
            plain = self.answer(Order(start, len(written) - done, top_logprobs=_TOP, mode="ar")).chances
            same = 0
            while same < min(len(plain), len(written) - done) and plain[same].text == written[done + same]:
                same += 1
            done += same
            if done == len(written) or same >= len(plain):
                break  # plain decoding ended where its own end token stands
            other = plain[same]
            gap = next((other.logprob - chance for text, chance in other.top if text == written[done]), float("inf"))
            divergences.append(Divergence(done, written[done], other.text, gap))
            done += 1
            if len(divergences) == _MOST_DIVERGENCES:
                return Forced(done, tuple(divergences), method, f"it stopped after {_MOST_DIVERGENCES} divergences")
        return Forced(done, tuple(divergences), method)

    def _ids_of(self, written: list[str]) -> tuple[int, ...] | None:
        """Ids of an answer's tokens; None where the text does not lead back to the same tokens."""
        ids = self.tokenize(Order("".join(written), 0))
        pieces = [self.http.post_json("/detokenize", {"tokens": [i]}, self.info_timeout_s).get("text") for i in ids]
        return ids if pieces == written else None

    def _body(self, order: Order) -> tuple[str, dict[str, Any]]:
        path, body = super()._body(order)
        if order.mode is not None:
            body["ddtree"] = {"mode": order.mode}
        return path, body

    def _rounds(self, told: dict[str, Any], choice: dict[str, Any]) -> Rounds | None:
        stats = told.get("ddtree")
        if not isinstance(stats, dict):
            return None
        budgets = tuple(float(each) for each in stats["round_budgets"])
        lengths = stats["accepted_lengths"]
        drafted = [(length, budget) for length, budget in zip(lengths, budgets, strict=True) if budget]
        return Rounds(
            len(drafted), sum(length for length, _ in drafted), tuple(b for _, b in drafted), tuple(stats["notes"])
        )


def _renamed(name: str) -> str:
    return "context_length" if name == "max_model_len" else name
