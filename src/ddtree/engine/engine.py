"""The engine that people call."""

import secrets
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.engine.completion import Completion, StreamEvent
from ddtree.engine.constraint import Constraint
from ddtree.engine.cost_store import CostStore
from ddtree.engine.device import free_memory_bytes
from ddtree.engine.facts import describe
from ddtree.engine.graph_limit import GraphLimit
from ddtree.engine.graph_probe import find_limit
from ddtree.engine.graph_runner import GraphRunner
from ddtree.engine.loading import Graphs, LoadOptions, load_parts
from ddtree.engine.near_tie import LosslessReport, check_lossless
from ddtree.engine.pages import PagePool
from ddtree.engine.prefix_cache import PrefixCache
from ddtree.engine.prompt import Prompt, checked_ids, encode_prompt
from ddtree.engine.runner import EagerRunner, Runner
from ddtree.engine.sampling_params import MAX_SEED, SamplingParams
from ddtree.engine.scheduler import Scheduler
from ddtree.engine.sequence import Sequence
from ddtree.engine.speculation import MAX_BUDGET, Speculation
from ddtree.engine.state import DeviceState, SamplingFlags
from ddtree.engine.warm_up import WarmUp
from ddtree.errors import UserError
from ddtree.kernels.exact_set import cost_of
from ddtree.kernels.fast_set import why_not_fast
from ddtree.kernels.kernel_set import TWINS
from ddtree.models.drafter import Drafter
from ddtree.models.drafter_config import SlidingBlock
from ddtree.models.target import Target
from ddtree.models.tokenizer import Tokenizer

Progress = Callable[[str, float], None]
"""Called with a stage's name and how much of it is done, 0 to 1."""

PAGE_TOKENS = 16


@dataclass(frozen=True)
class Occupancy:
    """How full an engine is.

    Attributes:
        running: sequences that have a slot.
        waiting: sequences that wait for one.
        cache_tokens_used: room of the cache that is promised to running sequences.
        cache_tokens: room of the cache.
        prefix_tokens: tokens whose keys and values later prompts can find, used or not.
    """

    running: int
    waiting: int
    cache_tokens_used: int
    cache_tokens: int
    prefix_tokens: int


class Engine:
    """A target, its drafter if there is one, and the sequences in flight. Make one with `Engine.load`.

    Not for several threads at once. A server drives it from one.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        *,
        speculation: Speculation,
        draft_window: int | None,
        max_model_len: int,
        memory_fraction: float,
        max_batch: int,
        prefill_tokens: int,
        identity: dict[str, Any],
        graphs: Graphs = "probe",
        prefix_cache: bool = False,
        on_progress: Progress | None = None,
    ) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.speculation = speculation
        self._block_size = drafter.config.block_size if drafter else None
        speculation.resolve(self._block_size)
        self._prefill_tokens, self._identity = prefill_tokens, identity
        self._memory_fraction = memory_fraction
        self.max_batch = max_batch
        widest = max_model_len + max(MAX_BUDGET + 1, 2 * prefill_tokens)  # a round's rows, or a filled-up chunk
        table_pages = -(-widest // PAGE_TOKENS)
        token_bytes = _cache_bytes_per_token(target, drafter)
        affordable = int(free_memory_bytes(target.device) * memory_fraction) // (token_bytes * PAGE_TOKENS)
        n_pages = min(affordable, max_batch * table_pages + 1)
        if (n_pages - 1) * PAGE_TOKENS < max_model_len:
            raise UserError(
                f"a cache of {max_model_len} tokens needs {max_model_len * token_bytes / 2**30:.1f} GiB, "
                f"{affordable * token_bytes * PAGE_TOKENS / 2**30:.1f} GiB may be used",
                "lower max_model_len, or raise the memory fraction",
            )
        self.state = DeviceState(
            target,
            drafter,
            slots=max_batch + 1,  # one to spare, with which graphs fill up their batches
            n_pages=n_pages,
            page_tokens=PAGE_TOKENS,
            table_pages=table_pages,
            max_model_len=max_model_len,
            draft_window=draft_window,
        )
        self._pool = PagePool(n_pages, PAGE_TOKENS)
        self._prefixes, self._prefixes_on = PrefixCache(self._pool, is_on=prefix_cache), prefix_cache
        self._runner = self._make_runner(max_batch, graphs, on_progress or (lambda stage, fraction: None))
        costs = CostStore(describe(target, drafter, self.state, speculation) | identity)
        self._scheduler = Scheduler(
            self.state, self._pool, target, drafter, self._runner, prefill_tokens, costs, self._prefixes
        )

    def _make_runner(self, max_batch: int, graphs: Graphs, tell: Progress) -> Runner:
        why_not = "plain torch kernels" if self.target.kernels is TWINS else why_not_fast(self.target.device)
        if why_not or graphs == "off":
            return EagerRunner(self.state, self.target, self.drafter, why_not or "switched off")
        limit = GraphLimit(MAX_BUDGET)
        if graphs == "probe":
            drafter = self.drafter.config if self.drafter else None
            limit = find_limit(
                self.target.config, drafter, self.target.dtype, MAX_BUDGET, tell, exact=self.target.kernels.is_exact
            )
        if limit.budget is None:
            return EagerRunner(self.state, self.target, self.drafter, limit.reason)
        buckets = tuple(sorted({*(2**i for i in range(7) if 2**i < max_batch), max_batch}))
        return GraphRunner(self.state, self.target, self.drafter, buckets, limit)

    @classmethod
    def load(
        cls,
        model: str | Path,
        draft: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        speculation: Speculation | None = None,
        block_size: int | None = None,
        draft_window: int | None = None,
        sliding_block: SlidingBlock = "bidirectional",
        max_model_len: int | None = None,
        memory_fraction: float = 0.8,
        max_batch: int = 8,
        prefill_tokens: int = 512,
        graphs: Graphs = "probe",
        prefix_cache: bool = False,
        threads: int | None = None,
        exact: bool = False,
        on_progress: Progress | None = None,
    ) -> "Engine":
        """Load a target and, if given, its DFlash drafter.

        Args:
            model: Hugging Face folder of the target (Llama, Qwen2 or Qwen3 family).
            draft: folder of the drafter in the z-lab format.
            device: `auto`, `cpu` or `cuda`.
            dtype: `auto`, `bfloat16` or `float32`.
            speculation: what requests draft unless they say otherwise; a tree with a drafter, `ar` without.
            block_size: tokens of a drafted block, 2 to 64; the drafter's own if None.
            draft_window: the drafter sees only so many of the last committed tokens; None for all.
            sliding_block: how the drafter's sliding-window layers see the block, `bidirectional` or `causal`.
            max_model_len: tokens of prompt and answer together; the model's context if None.
            memory_fraction: share of the memory that is free after loading that the caches may take, in (0, 1].
            max_batch: sequences that run at once.
            prefill_tokens: prompt tokens that are committed between two rounds.
            graphs: on a GPU, `on` runs rounds as CUDA graphs, `off` does not; `probe` tries a captured round in a child
                process at the first start on a machine, and runs what it could capture.
            prefix_cache: keep keys and values of finished sequences, as far as there is room, for prompts that begin
                alike. Answers are the same in float32; in bfloat16 near-ties may fall otherwise, as with other batches.
            threads: CPU threads; torch's default if None.
            exact: every mode, budget and batch gives what plain decoding in exact mode gives, bit for bit, in bfloat16
                too. Costs speed: on the CPU the target runs one row at a time, so that drafts save nothing there.
            on_progress: told the stages of loading.

        Raises:
            UserError: something given is out of range, missing, damaged or does not fit; says what to do.
        """
        tell = on_progress or (lambda stage, fraction: None)
        parts = load_parts(
            LoadOptions(
                Path(model), Path(draft) if draft is not None else None, device, dtype, block_size, draft_window,
                sliding_block, max_model_len, memory_fraction, max_batch, prefill_tokens, graphs, threads,
                exact,
            ),
            tell,
        )  # fmt: skip
        engine = cls(
            parts.target,
            parts.drafter,
            parts.tokenizer,
            speculation=speculation or Speculation("tree" if parts.drafter else "ar"),
            draft_window=draft_window,
            max_model_len=parts.max_model_len,
            memory_fraction=memory_fraction,
            max_batch=max_batch,
            prefill_tokens=prefill_tokens,
            graphs=graphs,
            prefix_cache=prefix_cache,
            on_progress=tell,
            identity=parts.identity,
        )
        engine.warm_up(tell)
        tell("ready", 1.0)
        return engine

    def warm_up(self, tell: Progress) -> None:
        """Where requests choose their budgets, time rounds now, unless an earlier start did."""
        shape, _ = self._runner.fit(self.speculation.resolve(self._block_size))
        if shape.is_auto:
            tell("timing rounds of every budget", 0.95)
            self._scheduler.learn_costs(1, shape, SamplingFlags())

    def warm_up_batches(self, tell: Progress) -> None:
        """On a GPU with graphs, capture what requests of every batch size need, so that none waits for it. For servers.

        Raises:
            UserError: there is not enough memory.
        """
        if self._runner.overlaps:
            shape, _ = self._runner.fit(self.speculation.resolve(self._block_size))
            WarmUp(self._scheduler, self._runner, self.state, shape, self.max_batch, self._prefill_tokens).run(tell)

    def generate(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] = SamplingParams(),  # noqa: B008 - frozen
        *,
        speculation: Speculation | None = None,
        record_trees: bool = False,
        on_progress: Progress | None = None,
    ) -> list[Completion]:
        """Answer prompts, several at a time.

        Args:
            prompts: each raw text, token ids or chat messages.
            params: one for all or one for each.
            speculation: instead of the engine's own.
            record_trees: keep every round's tree in the completions.
            on_progress: told the share of prompts that are done.

        Returns:
            completions in the order of the prompts.

        Raises:
            UserError: a prompt is empty or too long, or the request cannot be served.
        """
        if isinstance(prompts, str):
            raise UserError("prompts is one string", "give a list of prompts")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UserError(
                f"{len(each)} sampling params for {len(prompts)} prompts", "give one for all or one for each"
            )
        sequences = [self._sequence(p, s, speculation, record_trees) for p, s in zip(prompts, each, strict=True)]
        try:
            for sequence in sequences:
                self._scheduler.add(sequence)
            while any(s.finish_reason is None for s in sequences):
                self._scheduler.step()
                if on_progress:
                    on_progress("generating", sum(s.finish_reason is not None for s in sequences) / len(sequences))
        finally:
            for sequence in sequences:
                self._scheduler.drop(sequence)
        return [s.completion() for s in sequences]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        *,
        speculation: Speculation | None = None,
        record_trees: bool = False,
    ) -> Iterator[StreamEvent]:
        """Answer one prompt piece by piece; the last event carries the completion.

        Raises:
            UserError: as `generate`, at once and not at the first event.
        """
        sequence = self._sequence(prompt, params, speculation, record_trees)
        self._scheduler.add(sequence)
        return self._events(sequence)

    def _events(self, sequence: Sequence) -> Iterator[StreamEvent]:
        text, tokens = 0, 0
        try:
            while sequence.finish_reason is None:
                self._scheduler.step()
                if len(sequence.output) > tokens or sequence.finish_reason:
                    done = sequence.completion() if sequence.finish_reason else None
                    yield StreamEvent(sequence.text[text:], sequence.output[tokens:], done)
                    text, tokens = len(sequence.text), len(sequence.output)
        finally:
            self._scheduler.drop(sequence)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        *,
        speculation: Speculation | None = None,
        record_trees: bool = False,
        constraint: Constraint | None = None,
    ) -> Sequence:
        """Queue one prompt and return at once; `step` advances it together with all others. For servers.

        Args:
            constraint: rules that the answer follows; its rounds then wait for the host, apart from other rounds.

        Raises:
            UserError: as `generate`.
        """
        sequence = self._sequence(prompt, params, speculation, record_trees)
        if constraint is not None:
            sequence.constraint = constraint
            sequence.stats.notes.append("a grammar: rounds are split by the host, apart from those of other requests")
        self._scheduler.add(sequence)
        return sequence

    def step(self) -> list[Sequence]:
        """Run one round of everything submitted; returns the sequences that got tokens."""
        return self._scheduler.step()

    def cancel(self, sequence: Sequence) -> None:
        """Forget a submitted sequence and free its place; one that is finished or forgotten already is left alone."""
        self._scheduler.drop(sequence)

    def occupancy(self) -> Occupancy:
        """How many sequences run and wait, and how much of the cache they hold."""
        free_tokens = self._prefixes.free_pages * PAGE_TOKENS
        cache_tokens = (self._pool.n_pages - 1) * PAGE_TOKENS
        return Occupancy(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            cache_tokens_used=cache_tokens - free_tokens,
            cache_tokens=cache_tokens,
            prefix_tokens=self._prefixes.facts().tokens,
        )

    def check_lossless(self, prompt: Prompt, token_ids: Seq[int]) -> LosslessReport:
        """Hold a greedy answer against the target decoding one token a step (see `ddtree.engine.near_tie`).

        Raises:
            UserError: other requests are in flight, or prompt and answer do not fit the context.
        """
        if not self._scheduler.is_idle:
            raise UserError("requests are in flight", "check when they are done")
        vocab_size = self.target.config.vocab_size
        ids = encode_prompt(prompt, self.tokenizer, vocab_size)
        answer = checked_ids(token_ids, vocab_size, "answer")
        if len(ids) + len(answer) > self.state.max_model_len:
            raise UserError(
                f"prompt and answer have {len(ids) + len(answer)} tokens, the context {self.state.max_model_len}",
                "raise max_model_len",
            )
        pages = self._prefixes.take([], self._pool.pages_for(len(ids) + len(answer)))
        try:
            return check_lossless(self.state, 0, pages, self.target, ids, answer, self._prefill_tokens)
        finally:
            self._prefixes.release(pages)

    def facts(self) -> dict[str, Any]:
        """What this engine is and how it runs."""
        return {
            **self._identity,
            **describe(self.target, self.drafter, self.state, self.speculation),
            "cache_tokens": (self._pool.n_pages - 1) * PAGE_TOKENS,
            "memory_fraction": self._memory_fraction,
            "prefix_cache": vars(self._prefixes.facts()) if self._prefixes_on else None,
            "rounds": self._runner.facts(),
        }

    def round_facts(self) -> dict[str, Any]:
        """What rounds turned out to be so far: how they are launched, which CUDA graphs there are, what they cost.

        May be called from another thread than the engine's.
        """
        graphs = self._runner if isinstance(self._runner, GraphRunner) else None
        costs: dict[str, dict[str, float]] = {}
        for (batch, budget), cost_ms in sorted(self._scheduler.round_costs_ms().items()):
            costs.setdefault(str(batch), {})[str(budget)] = round(cost_ms, 4)
        return {
            "launch": "cuda graph" if graphs else "eager",
            "graph_replays": graphs.replays if graphs else 0,
            "graphs": [
                {
                    "batch": key.batch,
                    "mode": key.shape.mode,
                    "budget": key.shape.budget,
                    **vars(key.flags),
                    "capture_ms": round(captured.capture_ms, 1),
                }
                for key, captured in list(graphs.captured.items())
            ]
            if graphs
            else [],
            "cost_ms_by_batch_and_budget": costs,
        }

    def _sequence(
        self, prompt: Prompt, params: SamplingParams, speculation: Speculation | None, record_trees: bool
    ) -> Sequence:
        ids = encode_prompt(prompt, self.tokenizer, self.target.config.vocab_size)
        limit = self.state.max_model_len
        if len(ids) >= limit:
            raise UserError(
                f"the prompt has {len(ids)} tokens, the context {limit}", "shorten it, or raise max_model_len"
            )
        vocab_size = self.target.config.vocab_size
        if unknown := [token for token in params.logit_bias if token >= vocab_size]:
            raise UserError(f"logit_bias names token {unknown[0]}", f"give ids from 0 to {vocab_size - 1}")
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= set(self.target.config.eos_token_ids)
        shape, note = self._runner.fit((speculation or self.speculation).resolve(self._block_size))
        cost = cost_of(self.target.kernels)
        return Sequence(
            prompt=ids,
            params=params,
            seed=secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed,
            end_token_ids=frozenset(ends),
            token_limit=min(len(ids) + params.max_new_tokens, limit),
            shape=shape,
            notes=[text for text in (note, cost and f"exact mode: {cost}") if text],
            tokenizer=self.tokenizer,
            vocab_size=vocab_size,
            record_trees=record_trees,
        )


def _cache_bytes_per_token(target: Target, drafter: Drafter | None) -> int:
    values = target.config.n_layers * target.config.layer.kv_size
    if drafter is not None:
        values += drafter.config.n_layers * drafter.config.layer.kv_size
    return values * target.dtype.itemsize
