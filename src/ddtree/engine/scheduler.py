"""Which sequences run next: admission, prefill in chunks, and rounds by groups that draft alike."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ddtree.engine.budget_policy import CANDIDATES, CUTS, BudgetPolicy, auto_shape
from ddtree.engine.completion import TracedTree
from ddtree.engine.cost_store import CostStore
from ddtree.engine.flight import Flight
from ddtree.engine.pages import PagePool
from ddtree.engine.prefill import PrefillKind
from ddtree.engine.prefix_cache import KeptPage, PrefixCache
from ddtree.engine.runner import EagerRunner, Launched, Runner
from ddtree.engine.sequence import Sequence
from ddtree.engine.speculation import DraftShape
from ddtree.engine.state import DeviceState, SamplingFlags
from ddtree.errors import UserError
from ddtree.kernels.forecast import read_forecast
from ddtree.models.drafter import Drafter
from ddtree.models.target import Target

MAX_ROUND_ROWS = 2048
"""Rows that one round verifies at most, all sequences together; larger groups take turns."""


MAX_PREFILL_ROWS = 1024
"""Prompt rows of one prefill at most, all sequences together."""


def fitting_budgets(bucket: int, largest: int) -> list[int]:
    """Budgets up to ``largest`` that `auto` can choose for a batch of this size."""
    return [budget for budget in CANDIDATES if bucket * (budget + 1) <= MAX_ROUND_ROWS and budget <= largest]


class Scheduler:
    """Runs sequences on the slots of one `DeviceState`.

    A sequence is admitted when a slot and all the pages that it can ever need are free, so what runs is never evicted.
    Where the runner overlaps, a step launches the next round before it reads the tokens of the one in flight; a
    sequence that turns out to have ended takes part in one round too many, whose tokens nobody reads. Sequences under a
    constraint run in rounds of their own, which the host splits and reads at once.

    What a sequence finds of its prompt in the `PrefixCache` is not computed again. A prompt can be found as soon as its
    prefill is launched, an answer when it is done: work on the device runs in order.

    Args:
        prefixes: gives and takes the pages.
        runner: how rounds are launched.
        prefill_tokens: prompt tokens that a sequence commits between two rounds.
        costs: times of rounds that earlier starts measured.
    """

    def __init__(
        self,
        state: DeviceState,
        pool: PagePool,
        target: Target,
        drafter: Drafter | None,
        runner: Runner,
        prefill_tokens: int,
        costs: CostStore,
        prefixes: PrefixCache,
    ) -> None:
        self._state, self._pool, self._target, self._drafter = state, pool, target, drafter
        self._prefixes = prefixes
        self._runner, self._split = runner, EagerRunner(state, target, drafter)
        self._costs, self._policy = costs, BudgetPolicy(drafter.config.block_size - 1 if drafter else 0)
        self._policy.cost_ms.update(costs.load())
        self._in_flight: list[Prefilling | Decoding] = []
        self._last_landing = 0.0
        self._prefill_tokens = prefill_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._free_slots = list(range(state.committed.shape[0] - 1))

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def round_costs_ms(self) -> dict[tuple[int, int], float]:
        """Time of a round by batch and budget, as far as `budget="auto"` has measured it."""
        return dict(self._policy.cost_ms)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            UserError: it could never be admitted.
        """
        if self._pages_of(sequence) > self._pool.n_pages - 1:
            held = (self._pool.n_pages - 1) * self._pool.page_tokens
            raise UserError(
                f"the request needs a cache of {self._room_of(sequence)} tokens, the engine has {held}",
                "lower max_new_tokens, or raise the memory fraction",
            )
        # The last token is computed in any case: what follows it is not kept.
        sequence.prefix_keys = self._prefixes.keys(sequence.prompt[:-1], self._kind_of(sequence))
        self._waiting.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that nobody waits for any more."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running:
            self._release(sequence)

    def step(self) -> list[Sequence]:
        """Admit, launch one chunk of each new prompt and one round of everything that decodes, and read what is done.

        Returns:
            the sequences that got tokens.
        """
        try:
            return self._step()
        except BaseException:
            self._prefixes.clear()  # who knows what was written
            for sequence in self._running:
                sequence.is_sound = False
            raise

    def _step(self) -> list[Sequence]:
        landing: Iterable[Prefilling | Decoding] = self._in_flight
        self._in_flight = []
        self._admit()
        decoding = [s for s in self._running if s.is_prefilled]
        prefills, rounds = self._prefill_groups(), self._round_groups(decoding)

        def launches(constrained: bool) -> Iterator[Prefilling | Decoding]:
            yield from (self._prefill(group) for group in prefills if _constrained(group) == constrained)
            yield from (self._round(shape, group) for shape, group in rounds if _constrained(group) == constrained)

        # What is not launched here is launched while the line below lands it, one piece of work after the other.
        if self._runner.overlaps:
            self._in_flight = list(launches(constrained=False))
        else:
            landing = launches(constrained=False)
        landing = chain(landing, launches(constrained=True))
        advanced = [sequence for work in landing for sequence in self._land(work)]
        for sequence in [s for s in advanced if s.finish_reason]:
            self._release(sequence)
        return advanced

    def _room_of(self, sequence: Sequence) -> int:
        """Tokens that the sequence's pages must hold: its own, a round's rows, and a round beyond its end."""
        block_size = self._drafter.config.block_size if self._drafter else 1
        overshoot = block_size if self._runner.overlaps else 0
        return sequence.token_limit + overshoot + max(sequence.shape.rows, block_size)

    def _pages_of(self, sequence: Sequence) -> int:
        return self._pool.pages_for(self._room_of(sequence))

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            found = self._prefixes.find(sequence.prefix_keys, drafts=sequence.shape.budget > 0)
            own_pages = self._pages_of(sequence) - len(found)
            if not self._prefixes.fits(found, own_pages):
                return
            self._waiting.popleft()
            self._seat(sequence, found, own_pages)

    def _seat(self, sequence: Sequence, found: list[KeptPage], own_pages: int) -> None:
        sequence.slot = self._free_slots.pop(0)
        sequence.pages = self._prefixes.take(found, own_pages)
        cached = len(found) * self._pool.page_tokens
        sequence.prefilled = sequence.committed = sequence.stats.cached_tokens = cached
        sequence.drafted = cached if sequence.shape.budget else 0
        self._prefixes.note_prompt(len(sequence.prompt), cached)
        self._state.seat(sequence.slot, sequence.prompt, sequence.pages, sequence.params, sequence.seed, cached)
        self._running.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._publish(sequence, [*sequence.prompt, *sequence.output][: sequence.committed])
        self._prefixes.release(sequence.pages)
        self._free_slots.append(sequence.slot)
        self._free_slots.sort()

    def _publish(self, sequence: Sequence, tokens: list[int]) -> None:
        """Let later sequences find the full pages of ``tokens``, which are a beginning of the sequence's own."""
        if not sequence.is_sound:
            return
        keys = self._prefixes.keys(tokens, self._kind_of(sequence), sequence.prefix_keys)
        self._prefixes.publish(keys, sequence.pages, sequence.drafted // self._pool.page_tokens)

    def _kind_of(self, sequence: Sequence) -> int:
        """What of a prompt's length its keys and values depend on."""
        ropes = [self._target.rope] + ([self._drafter.rope] if self._drafter else [])
        return max(rope.length_kind(len(sequence.prompt)) for rope in ropes)

    def _prefill(self, group: list[Sequence]) -> "Prefilling":
        """Commit the next prompt tokens of each sequence; those whose prompt ends choose their first token."""
        began = time.perf_counter()
        chunks = [s.prompt[s.prefilled : s.prefilled + self._prefill_tokens] for s in group]
        slots, flags = [s.slot for s in group], SamplingFlags.of(s.params for s in group)
        kind = PrefillKind(
            is_last=len(group[0].prompt) == group[0].prefilled + len(chunks[0]),
            drafts=group[0].shape.budget > 0,
            flags=flags,
        )
        bound = max(s.committed for s in group)
        constraints = [s.constraint for s in group if s.constraint is not None]
        if constraints:
            packed = self._split.prefill(slots, chunks, kind, bound, constraints)
        else:
            packed = self._runner.prefill(slots, chunks, kind, bound)
        for sequence, chunk in zip(group, chunks, strict=True):
            sequence.prefilled = sequence.committed = sequence.prefilled + len(chunk)
            sequence.drafted = sequence.committed if kind.drafts else sequence.drafted
            if sequence.is_prefilled:
                self._publish(sequence, sequence.prompt)
        return Prefilling(group, Flight(packed, 1, began) if packed is not None else None)

    def _prefill_groups(self) -> list[list[Sequence]]:
        """Sequences whose next chunks run at one size, end alike, draft alike and are constrained alike."""
        by_kind: dict[tuple[int, bool, bool, bool], list[Sequence]] = {}
        for sequence in self._running:
            if not sequence.is_prefilled:
                left = len(sequence.prompt) - sequence.prefilled
                rows, is_constrained = min(left, self._prefill_tokens), sequence.constraint is not None
                runner = self._split if is_constrained else self._runner
                kind = (runner.prefill_rows(rows), rows == left, sequence.shape.budget > 0, is_constrained)
                by_kind.setdefault(kind, []).append(sequence)
        return [part for (rows, *_), group in by_kind.items() for part in _parts(group, MAX_PREFILL_ROWS // rows)]

    def _round_groups(self, decoding: list[Sequence]) -> list[tuple[DraftShape, list[Sequence]]]:
        """Sequences that draft alike and are constrained alike, in parts that a round can verify."""
        by_shape: dict[tuple[DraftShape, bool], list[Sequence]] = {}
        for sequence in decoding:
            self._leave_speculation_past_the_drafter(sequence)
            by_shape.setdefault((sequence.shape, sequence.constraint is not None), []).append(sequence)
        return [
            (shape, part)
            for (shape, _), group in by_shape.items()
            for part in _parts(group, MAX_ROUND_ROWS // (1 if shape.is_auto else shape.rows))
        ]

    def _leave_speculation_past_the_drafter(self, sequence: Sequence) -> None:
        """A drafter with a shorter context than the target's stops drafting for this sequence, and says so."""
        if self._drafter is None or not sequence.shape.budget:
            return
        config = self._drafter.config
        if sequence.committed + config.block_size > config.max_positions:
            sequence.shape = DraftShape("ar", 0, 0)
            sequence.stats.notes.append(
                f"from token {sequence.committed} on decoded without drafts: "
                f"the drafter's context ends at {config.max_positions}"
            )

    def _round(self, shape: DraftShape, group: list[Sequence]) -> "Decoding":
        flags = SamplingFlags.of(s.params for s in group)
        bucket = self._runner.bucket_of(len(group))
        is_auto = shape.is_auto
        if is_auto:
            if self.learn_costs(bucket, shape, flags, at_most=1):  # one after each round, so that streams go on
                note = f"some time went into timing rounds of a batch of {bucket}, which no round's time shows"
                for sequence in group:
                    if note not in sequence.stats.notes:
                        sequence.stats.notes.append(note)
            shape = auto_shape(self._policy.choose(bucket, [s.outlook for s in group]), shape.top_k)
        bound = max(s.committed for s in group)
        slots = [s.slot for s in group]
        constraints = [s.constraint for s in group if s.constraint is not None]
        if constraints:  # times of split rounds say nothing about the others
            return Decoding(group, shape, bucket, False, self._split.launch(slots, shape, flags, bound, constraints))
        launched = self._runner.launch(slots, shape, flags, bound)
        if any(sequence.record_trees for sequence in group):
            launched = launched.copied()
        return Decoding(group, shape, bucket, is_auto, launched)

    def learn_costs(self, bucket: int, shape: DraftShape, flags: SamplingFlags, at_most: int | None = None) -> bool:
        """For a batch of this size, time a round of every budget that fits and was not timed, the smallest first.

        Args:
            at_most: budgets that are timed now; the others at the next calls.

        Returns:
            whether there was one to time.
        """
        unknown = [
            budget for budget in fitting_budgets(bucket, shape.budget) if (bucket, budget) not in self._policy.cost_ms
        ]
        for budget in unknown[:at_most]:
            ms = self._runner.measure(bucket, auto_shape(budget, shape.top_k), flags)
            self._policy.time(bucket, budget, ms)
        if unknown:
            self._costs.save(self._policy.cost_ms)
        return bool(unknown)

    def _land(self, work: "Prefilling | Decoding") -> list[Sequence]:
        """Hand out the tokens of finished work; sequences that ended meanwhile get none."""
        flight = work.first_tokens if isinstance(work, Prefilling) else work.launched.flight
        if flight is None:
            return []
        rows = flight.land()
        now = time.perf_counter()
        elapsed_ms = 1e3 * (now - max(flight.launched, self._last_landing))
        self._last_landing = now
        if isinstance(work, Decoding) and work.is_auto:
            self._policy.time(work.bucket, work.shape.budget, flight.device_ms() or elapsed_ms)
        depths = self._drafter.config.block_size - 1 if self._drafter else 0
        forecasts = len(CUTS) * (depths + 1) if isinstance(work, Decoding) and work.shape.forecasts else 0
        got, told = [], []
        for row, (sequence, landed) in enumerate(zip(work.group, rows, strict=True)):
            if sequence.finish_reason or sequence not in self._running:
                continue
            got.append(sequence)
            taken = sequence.extend(landed.tokens, landed.extra[forecasts:].tolist())
            if isinstance(work, Prefilling):
                sequence.stats.ttft_ms = 1e3 * (now - sequence.arrived)
                continue
            if work.shape.budget or work.shape.follows:
                sequence.drafted = sequence.committed  # the round began by writing the context up to its root
            sequence.committed += len(landed.tokens)
            sequence.stats.accepted_lengths.append(taken)
            sequence.stats.round_ms.append(elapsed_ms)
            sequence.stats.round_budgets.append(work.shape.budget)
            told.append(landed.extra[:forecasts])
            if sequence.record_trees:
                sequence.trees.append(_trace(work.launched, row))
        if forecasts and got and isinstance(work, Decoding):
            forecast = read_forecast(np.array(told), depths)
            self._policy.learn([sequence.outlook for sequence in got], work.shape.budget, forecast)
        return got


@dataclass(frozen=True)
class Prefilling:
    """A chunk under way; ``first_tokens`` only for the last chunk of a prompt."""

    group: list[Sequence]
    first_tokens: Flight | None


@dataclass(frozen=True)
class Decoding:
    """A round under way, with the shape that it really took."""

    group: list[Sequence]
    shape: DraftShape
    bucket: int
    is_auto: bool
    launched: Launched


def _trace(launched: Launched, row: int) -> TracedTree:
    tree, path = launched.tree, launched.path
    nodes = path.rows[row, 1 : int(path.accepted[row]) + 1] - 1
    return TracedTree(tree.to_draft_tree(row), int(tree.tokens[row, 0]), tuple(nodes.tolist()), int(path.roots[row]))


def _constrained(group: list[Sequence]) -> bool:
    return group[0].constraint is not None


def _parts(group: list[Sequence], size: int) -> list[list[Sequence]]:
    size = max(size, 1)
    return [group[i : i + size] for i in range(0, len(group), size)]
