"""The engine that people call."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from ddtree.engine.cache_size import PAGE_TOKENS, choose_cache_size
from ddtree.engine.completion import Completion, StreamEvent
from ddtree.engine.constraint import Constraint
from ddtree.engine.cost_store import CostStore
from ddtree.engine.facts import describe
from ddtree.engine.groups import auto_shapes
from ddtree.engine.intake import Intake
from ddtree.engine.loading import Graphs, LoadOptions, load_parts
from ddtree.engine.near_tie import LosslessReport, check_lossless
from ddtree.engine.pages import PagePool
from ddtree.engine.prefix_cache import PrefixCache
from ddtree.engine.prompt import Prompt
from ddtree.engine.runner_choice import choose_runner
from ddtree.engine.sampling_params import SamplingParams
from ddtree.engine.scheduler import Scheduler
from ddtree.engine.seating import Occupancy, Seating
from ddtree.engine.sequence import Sequence
from ddtree.engine.speculation import Speculation
from ddtree.engine.state import DeviceState, SamplingFlags
from ddtree.engine.warm_up import WarmUp
from ddtree.errors import UserError
from ddtree.models.drafter import Drafter
from ddtree.models.drafter_config import SlidingBlock
from ddtree.models.target import Target
from ddtree.models.tokenizer import Tokenizer

Progress = Callable[[str, float], None]
"""Called with a stage's name and how much of it is done, 0 to 1."""


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
        self.speculation, self.max_batch = speculation, max_batch
        self._prefill_tokens, self._memory_fraction, self._identity = prefill_tokens, memory_fraction, identity
        block_size = drafter.config.block_size if drafter else None
        speculation.resolve(block_size)
        size = choose_cache_size(
            target,
            drafter,
            max_model_len=max_model_len,
            max_batch=max_batch,
            prefill_tokens=prefill_tokens,
            memory_fraction=memory_fraction,
        )
        self.state = DeviceState(
            target,
            drafter,
            slots=max_batch + 1,  # one to spare, with which graphs fill up their batches
            n_pages=size.n_pages,
            page_tokens=PAGE_TOKENS,
            table_pages=size.table_pages,
            max_model_len=max_model_len,
            draft_window=draft_window,
        )
        self._pool = PagePool(size.n_pages, PAGE_TOKENS)
        self._prefixes, self._prefixes_on = PrefixCache(self._pool, is_on=prefix_cache), prefix_cache
        tell = on_progress or (lambda stage, fraction: None)
        self._runner = choose_runner(self.state, target, drafter, max_batch, graphs, tell)
        self._intake = Intake(target, tokenizer, block_size, max_model_len)
        self._seating = Seating(self.state, self._pool, self._prefixes, target, drafter, overlaps=self._runner.overlaps)
        costs = CostStore(describe(target, drafter, self.state, speculation) | identity)
        self._scheduler = Scheduler(self.state, target, drafter, self._runner, prefill_tokens, costs, self._seating)

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
        draft_temperature: float | None = None,
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
            draft_temperature: at which the drafter's distributions are taken to build a tree, 0.1 to 10; below 1 trees
                grow deeper, above 1 broader. For greedy requests; one that samples at temperature 1 or more gets trees
                built at 1, between them in proportion. None for the drafter's own, which is 1 unless its config says.
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
                exact, draft_temperature,
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
        """Where rounds choose their budgets, time and capture them now; times of an earlier start are taken over."""
        shape, _ = self._intake.shape(self.speculation, self._runner)
        if shape.is_auto:
            tell("timing rounds of every budget", 0.95)
            self._scheduler.learn_costs(1, shape, SamplingFlags())
            for each in auto_shapes(1, shape):
                self._runner.prepare(1, each, SamplingFlags())

    def warm_up_batches(self, tell: Progress) -> None:
        """On a GPU with graphs, capture what requests of every batch size need, so that none waits for it. For servers.

        Raises:
            UserError: there is not enough memory.
        """
        if self._runner.overlaps:
            shape, _ = self._intake.shape(self.speculation, self._runner)
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
                self._seating.add(sequence)
            while any(s.finish_reason is None for s in sequences):
                self._scheduler.step()
                if on_progress:
                    on_progress("generating", sum(s.finish_reason is not None for s in sequences) / len(sequences))
        finally:
            for sequence in sequences:
                self._seating.drop(sequence)
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
        self._seating.add(sequence)
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
            self._seating.drop(sequence)

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
        self._seating.add(sequence)
        return sequence

    def step(self) -> list[Sequence]:
        """Run one round of everything submitted; returns the sequences that got tokens."""
        return self._scheduler.step()

    def cancel(self, sequence: Sequence) -> None:
        """Forget a submitted sequence and free its place; one that is finished or forgotten already is left alone."""
        self._seating.drop(sequence)

    def occupancy(self) -> Occupancy:
        """How many sequences run and wait, and how much of the cache they hold."""
        return self._seating.occupancy()

    def check_lossless(self, prompt: Prompt, token_ids: Seq[int]) -> LosslessReport:
        """Hold a greedy answer against the target decoding one token a step (see `ddtree.engine.near_tie`).

        Raises:
            UserError: other requests are in flight, or prompt and answer do not fit the context.
        """
        if not self._seating.is_idle:
            raise UserError("requests are in flight", "check when they are done")
        ids, answer = self._intake.answered(prompt, token_ids)
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
            "cache_tokens": self._seating.cache_tokens,
            "memory_fraction": self._memory_fraction,
            "prefix_cache": vars(self._prefixes.facts()) if self._prefixes_on else None,
            "rounds": self._runner.facts(),
        }

    def round_facts(self) -> dict[str, Any]:
        """What rounds turned out to be so far: how they are launched, which CUDA graphs there are, what they cost.

        May be called from another thread than the engine's.
        """
        costs: dict[str, dict[str, float]] = {}
        for (batch, budget), cost_ms in sorted(self._scheduler.round_costs_ms().items()):
            costs.setdefault(str(batch), {})[str(budget)] = round(cost_ms, 4)
        return {**self._runner.launch_facts(), "cost_ms_by_batch_and_budget": costs}

    def _sequence(
        self, prompt: Prompt, params: SamplingParams, speculation: Speculation | None, record_trees: bool
    ) -> Sequence:
        return self._intake.sequence(prompt, params, speculation or self.speculation, self._runner, record_trees)
