"""What runs next: chunks of prompts and rounds, launched, read and learnt from."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ddtree.engine.budget_policy import CUTS, BudgetPolicy, auto_shape
from ddtree.engine.completion import TracedTree
from ddtree.engine.cost_store import CostStore
from ddtree.engine.flight import Flight
from ddtree.engine.groups import fitting_budgets, is_constrained, prefill_groups, round_groups
from ddtree.engine.prefill import PrefillKind
from ddtree.engine.runner import EagerRunner, Launched, Runner
from ddtree.engine.seating import Seating
from ddtree.engine.sequence import Sequence
from ddtree.engine.speculation import DraftShape
from ddtree.engine.state import DeviceState, SamplingFlags
from ddtree.kernels.forecast import read_forecast
from ddtree.models.drafter import Drafter
from ddtree.models.target import Target

CROWD, PATIENCE = 32, 2
"""Where so many sequences decode for each that wants its prompt prefilled, prompts wait for one another, so many rounds
at most: a prefill of four takes little longer than that of one, and holds up all that decode."""


class Scheduler:
    """Runs the sequences that a `Seating` has seated.

    Where the runner overlaps, a step launches the next round before it reads the tokens of the one in flight; a
    sequence that turns out to have ended takes part in one round too many, whose tokens nobody reads. Sequences under a
    constraint run in rounds of their own, which the host splits and reads at once.

    Args:
        runner: how rounds are launched.
        prefill_tokens: prompt tokens that a sequence commits between two rounds.
        costs: times of rounds that earlier starts measured.
        seating: who runs.
    """

    def __init__(
        self,
        state: DeviceState,
        target: Target,
        drafter: Drafter | None,
        runner: Runner,
        prefill_tokens: int,
        costs: CostStore,
        seating: Seating,
    ) -> None:
        self._drafter, self._seating = drafter, seating
        self._runner, self._split = runner, EagerRunner(state, target, drafter)
        self._depths = drafter.config.block_size - 1 if drafter else 0
        self._costs, self._policy = costs, BudgetPolicy(self._depths)
        self._policy.cost_ms.update(costs.load())
        self._in_flight: list[Prefilling | Decoding] = []
        self._last_landing = 0.0
        self._stood_back = 0
        self._prefill_tokens = prefill_tokens

    def round_costs_ms(self) -> dict[tuple[int, int], float]:
        """Time of a round by batch and budget, as far as `budget="auto"` has measured it."""
        return dict(self._policy.cost_ms)

    def step(self) -> list[Sequence]:
        """Admit, launch one chunk of each new prompt and one round of everything that decodes, and read what is done.

        Returns:
            the sequences that got tokens.
        """
        try:
            return self._step()
        except BaseException:
            self._seating.distrust()
            raise

    def _step(self) -> list[Sequence]:
        landing: Iterable[Prefilling | Decoding] = self._in_flight
        self._in_flight = []
        self._seating.admit()
        decoding = [s for s in self._seating.running if s.is_prefilled]
        prefilling = [s for s in self._seating.running if not s.is_prefilled]
        self._leave_speculation_past_the_drafter(decoding)
        if self._waits_for_company(prefilling, len(decoding)):
            prefilling = []
        prefills = prefill_groups(prefilling, self._prefill_tokens, self._runner, self._split)
        rounds = round_groups(decoding)

        def launches(constrained: bool) -> Iterator[Prefilling | Decoding]:
            yield from (self._prefill(group) for group in prefills if is_constrained(group) == constrained)
            yield from (self._round(shape, group) for shape, group in rounds if is_constrained(group) == constrained)

        # What is not launched here is launched while the line below lands it, one piece of work after the other.
        if self._runner.overlaps:
            self._in_flight = list(launches(constrained=False))
        else:
            landing = launches(constrained=False)
        landing = chain(landing, launches(constrained=True))
        advanced = [sequence for work in landing for sequence in self._land(work)]
        for sequence in [s for s in advanced if s.finish_reason]:
            self._seating.release(sequence)
        return advanced

    def _waits_for_company(self, prefilling: list[Sequence], n_decoding: int) -> bool:
        """Whether new prompts stand back this time: where many decode, all of them wait for every prefill."""
        waits = (
            0 < CROWD * len(prefilling) <= n_decoding
            and self._stood_back < PATIENCE
            and self._runner.overlaps
            and all(sequence.prefilled == sequence.stats.cached_tokens for sequence in prefilling)
        )
        self._stood_back = self._stood_back + 1 if waits else 0
        return waits

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
                self._seating.publish(sequence, sequence.prompt)
        return Prefilling(group, Flight(packed, 1, began) if packed is not None else None)

    def _leave_speculation_past_the_drafter(self, decoding: list[Sequence]) -> None:
        """A drafter with a shorter context than the target's stops drafting where it ends, and the answer says so."""
        if self._drafter is None:
            return
        context = self._drafter.config.max_positions
        last = context - self._drafter.config.block_size
        for sequence in decoding:
            if sequence.committed > last and sequence.shape.budget:
                sequence.shape = DraftShape("ar", 0, 0)
                sequence.stats.notes.append(
                    f"from token {sequence.committed} on decoded without drafts: "
                    f"the drafter's context ends at {context}"
                )

    def _round(self, shape: DraftShape, group: list[Sequence]) -> "Decoding":
        flags = SamplingFlags.of(s.params for s in group)
        bucket = self._runner.bucket_of(len(group))
        is_auto, is_news = shape.is_auto, False
        if is_auto:
            if self.learn_costs(bucket, shape, flags, at_most=1):  # one after each round, so that streams go on
                note = f"some time went into timing rounds of a batch of {bucket}, which no round's time shows"
                for sequence in group:
                    if note not in sequence.stats.notes:
                        sequence.stats.notes.append(note)
            budget, is_news = self._policy.next_round(bucket, [s.outlook for s in group])
            shape = auto_shape(budget, shape.top_k)
        bound = max(s.committed for s in group)
        slots = [s.slot for s in group]
        constraints = [s.constraint for s in group if s.constraint is not None]
        if constraints:  # times of split rounds say nothing about the others
            split = self._split.launch(slots, shape, flags, bound, constraints=constraints)
            return Decoding(group, shape, bucket, False, is_news, split)
        launched = self._runner.launch(slots, shape, flags, bound, is_timed=is_news)
        if any(sequence.record_trees for sequence in group):
            launched = launched.copied()
        return Decoding(group, shape, bucket, is_auto, is_news, launched)

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
            round_ms = flight.device_ms() if self._runner.overlaps else elapsed_ms
            if round_ms is not None:
                self._policy.time(work.bucket, work.shape.budget, round_ms)
        forecasts = len(CUTS) * (self._depths + 1) if isinstance(work, Decoding) and work.shape.forecasts else 0
        got, told, running = [], [], self._seating.running
        for row, (sequence, landed) in enumerate(zip(work.group, rows, strict=True)):
            if sequence.finish_reason or sequence not in running:
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
        if forecasts and got and isinstance(work, Decoding) and work.is_news:
            forecast = read_forecast(np.array(told), self._depths)
            self._policy.learn([sequence.outlook for sequence in got], work.shape.budget, forecast)
        return got


@dataclass(frozen=True)
class Prefilling:
    """A chunk under way; ``first_tokens`` only for the last chunk of a prompt."""

    group: list[Sequence]
    first_tokens: Flight | None


@dataclass(frozen=True)
class Decoding:
    """A round under way, with the shape that it really took.

    Attributes:
        is_auto: the budget policy hears how long it took.
        is_news: it also hears what the round promised and held.
    """

    group: list[Sequence]
    shape: DraftShape
    bucket: int
    is_auto: bool
    is_news: bool
    launched: Launched


def _trace(launched: Launched, row: int) -> TracedTree:
    tree, path = launched.tree, launched.path
    nodes = path.rows[row, 1 : int(path.accepted[row]) + 1] - 1
    return TracedTree(tree.to_draft_tree(row), int(tree.tokens[row, 0]), tuple(nodes.tolist()), int(path.roots[row]))
