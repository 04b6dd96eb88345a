"""What Prometheus can scrape; `docs/server.md` lists the names."""

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

import ddtree
from ddtree.server.pulse import Beat
from ddtree.server.tally import Tally

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64)


class Metrics:
    """Counters of one server; safe to use from the engine thread and the event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by endpoint and HTTP status.", "endpoint", "status")
        self.cancelled = self._counter("cancelled_requests", "Requests whose client went away.", "endpoint")
        self.choices = self._counter("finished_choices", "Answers by what ended them.", "reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self.cached_prompt_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens of answers that were found in the prefix cache."
        )
        self.completion_tokens = self._counter("completion_tokens", "Generated tokens, end tokens included.")
        rounds = self._counter("rounds", "Rounds of sequences by mode and budget.", "mode", "budget")
        self._rounds_of = cache(rounds.labels)
        self.failed_steps = self._counter("failed_steps", "Engine steps that ended in a fault.")
        self.first_token_s = self._histogram("time_to_first_token_seconds", "Order to first token.", _SECONDS)
        self._inter_token_s = self._tally(
            "inter_token_seconds", "Time of a round over its tokens, once for each token.", _SECONDS
        )
        self._round_s = self._tally("round_seconds", "Time of a round.", _SECONDS)
        self.request_s = self._histogram("request_seconds", "Time of a request.", _SECONDS, "endpoint")
        self._accepted_length = self._tally(
            "accepted_length", "Tokens a round committed, the bonus included.", _LENGTHS
        )
        self.tau = self._gauge("tau", "Committed tokens per round over the last 512 rounds.")
        self.tokens_per_second = self._gauge("tokens_per_second", "Generated tokens a second over the last 10 s.")
        self.running = self._gauge("running_sequences", "Sequences that have a slot.")
        self.waiting = self._gauge("waiting_sequences", "Sequences that wait for a slot.")
        self.cache_tokens = self._gauge("cache_tokens", "Room of the cache, in tokens.")
        self.cache_tokens_used = self._gauge("cache_tokens_used", "Room promised to running sequences.")
        self.prefix_tokens = self._gauge("prefix_cache_tokens", "Tokens that later prompts can find, used or not.")
        self.ready = self._gauge("ready", "1 where /ready answers 200.")
        info = Gauge("ddtree_info", "The version.", ["version"], registry=self._registry)
        info.labels(ddtree.__version__).set(1)

    def count_round(self, mode: str, budget: int, tokens: int, round_s: float) -> None:
        """A sequence's part of a round, which committed ``tokens``; from the engine thread only."""
        self._rounds_of(mode, budget).inc()
        self._accepted_length.add(tokens)
        self._round_s.add(round_s)
        if tokens:
            self._inter_token_s.add(round_s / tokens, tokens)

    def text(self, beat: Beat, is_ready: bool) -> bytes:
        """The exposition, with gauges as they are now."""
        self.ready.set(is_ready)
        self.tau.set(beat.tau or 0.0)
        self.tokens_per_second.set(beat.tok_s)
        if beat.occupancy is not None:
            self.running.set(beat.occupancy.running)
            self.waiting.set(beat.occupancy.waiting)
            self.cache_tokens.set(beat.occupancy.cache_tokens)
            self.cache_tokens_used.set(beat.occupancy.cache_tokens_used)
            self.prefix_tokens.set(beat.occupancy.prefix_tokens)
        return generate_latest(self._registry)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"ddtree_{name}", words, labels, registry=self._registry)

    def _gauge(self, name: str, words: str) -> Gauge:
        return Gauge(f"ddtree_{name}", words, registry=self._registry)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"ddtree_{name}", words, labels, buckets=buckets, registry=self._registry)

    def _tally(self, name: str, words: str, buckets: tuple[float, ...]) -> Tally:
        return Tally(f"ddtree_{name}", words, buckets, self._registry)
