"""Runs a whole round as one replay of a CUDA graph, and the next before this one's tokens are read."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ddtree.engine.flight import Flight, HostMemory
from ddtree.engine.graph_limit import GraphLimit
from ddtree.engine.prefill import PrefillKind, prefill_chunk
from ddtree.engine.round import Round, decode_round
from ddtree.engine.runner import Launched
from ddtree.engine.speculation import MAX_BUDGET, DraftShape
from ddtree.engine.state import DeviceState, SamplingFlags
from ddtree.models.drafter import Drafter
from ddtree.models.target import Target

T = TypeVar("T")

WARM_UP_ROUNDS = 3
"""Rounds run before a capture, so that kernels are compiled and libraries have their workspaces."""


@dataclass(frozen=True)
class GraphKey:
    """What a captured round is fixed to."""

    batch: int
    shape: DraftShape
    flags: SamplingFlags


@dataclass(frozen=True)
class CapturedRound:
    """A graph, the tensor it reads its slots from, and the tensors that it leaves its results in."""

    graph: torch.cuda.CUDAGraph
    slots: torch.Tensor
    played: Round
    capture_ms: float


@dataclass(frozen=True)
class PrefillKey:
    """What a captured prefill is fixed to."""

    batch: int
    rows: int
    kind: PrefillKind


@dataclass(frozen=True)
class CapturedPrefill:
    """A graph, the tensor ``[batch, 2 + rows]`` of slots, lengths and tokens that it reads, and what it leaves."""

    graph: torch.cuda.CUDAGraph
    given: torch.Tensor
    packed: torch.Tensor | None


class GraphRunner:
    """Replays captured rounds; one graph for each batch bucket, draft shape and kind of sampling.

    Batches are filled up to a bucket with a spare slot, which owns no pages: what is done for it goes to the trash
    page.

    Attributes:
        captured: the graphs so far.
        replays: rounds run.
    """

    overlaps = True
    fills_up = True

    def __init__(
        self,
        state: DeviceState,
        target: Target,
        drafter: Drafter | None,
        buckets: tuple[int, ...],
        limit: GraphLimit | None = None,
    ) -> None:
        self._state, self._target, self._drafter = state, target, drafter
        self._buckets, self._limit = buckets, limit or GraphLimit(MAX_BUDGET)
        self._pool = torch.cuda.graph_pool_handle()
        self._seated: dict[GraphKey, list[int]] = {}
        self._host_memory = HostMemory(target.kernels.hand_over)
        self.captured: dict[GraphKey, CapturedRound] = {}
        self._prefills: dict[PrefillKey, CapturedPrefill] = {}
        self.replays = 0

    def launch(
        self, slots: list[int], shape: DraftShape, flags: SamplingFlags, context_bound: int, is_timed: bool = False
    ) -> Launched:
        """See `Runner`; ``context_bound`` is not needed, since kernels read the true lengths on the device."""
        bucket = self.bucket_of(len(slots))
        key = GraphKey(bucket, shape, flags)
        captured = self._round_of(key)
        filled = slots + [self._state.spare_slot] * (bucket - len(slots))
        if self._seated.get(key) != filled:
            captured.slots.copy_(self._state.on_device(filled), non_blocking=True)
            self._seated[key] = filled
        began, begun = time.perf_counter(), None
        if is_timed:  # not always: it takes the device 4 us
            begun = torch.cuda.Event(enable_timing=True)
            begun.record()
        captured.graph.replay()
        self.replays += 1
        played = captured.played
        flight = Flight(played.packed[: len(slots)], played.path.tokens.shape[1], began, self._host_memory, begun)
        return Launched(flight, played.tree, played.path)

    def prefill(
        self, slots: list[int], chunks: list[list[int]], kind: PrefillKind, context_bound: int
    ) -> torch.Tensor | None:
        """See `Runner`; chunks of any lengths, filled up to one that is captured."""
        rows, batch = self.prefill_rows(max(map(len, chunks))), self.bucket_of(len(slots))
        key = PrefillKey(batch, rows, kind)
        captured = self._prefills.get(key) or self._capture_prefill(key)
        spare = batch - len(slots)
        given = [
            [slot, len(chunk), *chunk, *[0] * (rows - len(chunk))] for slot, chunk in zip(slots, chunks, strict=True)
        ]
        given += [[self._state.spare_slot, 1] + [0] * rows] * spare
        captured.given.copy_(self._state.on_device(given), non_blocking=True)
        captured.graph.replay()
        return captured.packed[: len(slots)] if captured.packed is not None else None

    def prefill_rows(self, rows: int) -> int:
        """See `Runner`: a power of 2, at least 32."""
        return max(32, 1 << (rows - 1).bit_length())

    def bucket_of(self, batch: int) -> int:
        """See `Runner`."""
        return next(size for size in self._buckets if size >= batch)

    def prepare(self, bucket: int, shape: DraftShape, flags: SamplingFlags) -> None:
        """See `Runner`; captures."""
        self._round_of(GraphKey(bucket, shape, flags))

    def measure(self, bucket: int, shape: DraftShape, flags: SamplingFlags) -> float:
        """See `Runner`; over ten replays."""
        key = GraphKey(bucket, shape, flags)
        captured = self._round_of(key)
        captured.slots.fill_(self._state.spare_slot)
        self._seated.pop(key, None)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            captured.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 10

    def fit(self, shape: DraftShape) -> tuple[DraftShape, str]:
        """See `Runner`; budgets beyond what could be captured on this machine are cut."""
        largest = self._limit.budget or 0
        if shape.budget <= largest:
            return shape, ""
        note = f"budget cut to {largest}: {self._limit.reason}"
        if largest == 0:
            return DraftShape("ar", 0, 0), note
        return replace(shape, budget=largest, top_k=min(shape.top_k, largest)), note

    def facts(self) -> dict[str, Any]:
        """See `Runner`."""
        return {
            "graphs": True,
            "largest_budget": self._limit.budget,
            "reason": self._limit.reason,
            "captured_rounds": [
                {"batch": k.batch, "mode": k.shape.mode, "budget": k.shape.budget, "capture_ms": round(c.capture_ms)}
                for k, c in self.captured.items()
            ],
            "captured_prefills": [{"batch": k.batch, "rows": k.rows} for k in self._prefills],
            "replays": self.replays,
            "graph_bytes": sum(
                s["total_size"]
                for s in torch.cuda.memory_snapshot()
                if tuple(s["segment_pool_id"]) == tuple(self._pool)
            ),
        }

    def launch_facts(self) -> dict[str, Any]:
        """See `Runner`."""
        return {
            "launch": "cuda graph",
            "graph_replays": self.replays,
            "graphs": [
                {
                    "batch": key.batch,
                    "mode": key.shape.mode,
                    "budget": key.shape.budget,
                    **vars(key.flags),
                    "capture_ms": round(captured.capture_ms, 1),
                }
                for key, captured in list(self.captured.items())
            ],
        }

    def _round_of(self, key: GraphKey) -> CapturedRound:
        return self.captured.get(key) or self.capture(key)

    def capture(self, key: GraphKey) -> CapturedRound:
        """Record a round of ``key`` over the spare slot."""
        began = time.perf_counter()
        slots = torch.full((key.batch,), self._state.spare_slot, device=self._target.device)
        bound = self._state.max_model_len

        def play() -> Round:
            batch = self._state.select(slots, key.flags, bound)
            return decode_round(self._state, batch, self._target, self._drafter, key.shape)

        graph, played = self._record(play)
        captured = CapturedRound(graph, slots, played, 1e3 * (time.perf_counter() - began))
        self.captured[key] = captured
        return captured

    def _capture_prefill(self, key: "PrefillKey") -> "CapturedPrefill":
        given = torch.zeros(key.batch, 2 + key.rows, dtype=torch.int64, device=self._target.device)
        given[:, 0], given[:, 1] = self._state.spare_slot, 1
        drafter = self._drafter if key.kind.drafts else None

        def play() -> torch.Tensor | None:
            batch = self._state.select(given[:, 0].contiguous(), key.kind.flags, self._state.max_model_len)
            tokens, valid = given[:, 2:], given[:, 1].contiguous()
            return prefill_chunk(self._state, batch, self._target, drafter, tokens, key.kind.is_last, (), valid)

        graph, packed = self._record(play)
        self._prefills[key] = CapturedPrefill(graph, given, packed)
        return self._prefills[key]

    def _record(self, play: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture what ``play`` does, after playing it a few times."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_ROUNDS):
                play()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            played = play()
        return graph, played
