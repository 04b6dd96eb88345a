"""Runs a whole round as one replay of a CUDA graph, and the next before this one's tokens are read."""

import time
from dataclasses import dataclass

import torch

from ddtree.engine.flight import Flight
from ddtree.engine.round import Round, decode_round
from ddtree.engine.runner import Launched
from ddtree.engine.speculation import DraftShape
from ddtree.engine.state import DeviceState, SamplingFlags
from ddtree.models.drafter import Drafter
from ddtree.models.target import Target

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


class GraphRunner:
    """Replays captured rounds; one graph for each batch bucket, draft shape and kind of sampling.

    Batches are filled up to a bucket with a spare slot, which owns no pages: what is done for it goes to the trash
    page.

    Attributes:
        captured: the graphs so far.
        replays: rounds run.
    """

    overlaps = True

    def __init__(self, state: DeviceState, target: Target, drafter: Drafter | None, buckets: tuple[int, ...]) -> None:
        self._state, self._target, self._drafter = state, target, drafter
        self._buckets = buckets
        self._pool = torch.cuda.graph_pool_handle()
        self._seated: dict[GraphKey, list[int]] = {}
        self.captured: dict[GraphKey, CapturedRound] = {}
        self.replays = 0

    def launch(self, slots: list[int], shape: DraftShape, flags: SamplingFlags, context_bound: int) -> Launched:
        """See `Runner`; ``context_bound`` is not needed, since kernels read the true lengths on the device."""
        bucket = self.bucket_of(len(slots))
        key = GraphKey(bucket, shape, flags)
        captured = self.captured.get(key) or self.capture(key)
        filled = slots + [self._state.spare_slot] * (bucket - len(slots))
        if self._seated.get(key) != filled:
            captured.slots.copy_(self._state.on_device(filled), non_blocking=True)
            self._seated[key] = filled
        began = time.perf_counter()
        captured.graph.replay()
        self.replays += 1
        played = captured.played
        return Launched(
            Flight(played.packed[: len(slots)], played.path.tokens.shape[1], began), played.tree, played.path
        )

    def bucket_of(self, batch: int) -> int:
        """See `Runner`."""
        return next(size for size in self._buckets if size >= batch)

    def measure(self, bucket: int, shape: DraftShape, flags: SamplingFlags) -> float:
        """See `Runner`; over ten replays."""
        key = GraphKey(bucket, shape, flags)
        captured = self.captured.get(key) or self.capture(key)
        captured.slots.fill_(self._state.spare_slot)
        self._seated.pop(key, None)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            captured.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 10

    def capture(self, key: GraphKey) -> CapturedRound:
        """Record a round of ``key`` over the spare slot."""
        began = time.perf_counter()
        slots = torch.full((key.batch,), self._state.spare_slot, device=self._target.device)
        bound = self._state.max_model_len

        def play() -> Round:
            self._state.empty_spare_slot()
            batch = self._state.select(slots, key.flags, bound)
            return decode_round(self._state, batch, self._target, self._drafter, key.shape)

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
        captured = CapturedRound(graph, slots, played, 1e3 * (time.perf_counter() - began))
        self.captured[key] = captured
        return captured
