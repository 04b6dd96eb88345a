"""Runs rounds one operation after another; the way of the CPU, and of a GPU without graphs."""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ddtree.engine.constraint import Constraint
from ddtree.engine.flight import Flight
from ddtree.engine.prefill import PrefillKind, prefill_chunk
from ddtree.engine.round import decode_round
from ddtree.engine.speculation import DraftShape
from ddtree.engine.state import DeviceState, SamplingFlags
from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.kernels.tree_walk import AcceptedPaths
from ddtree.models.drafter import Drafter
from ddtree.models.target import Target

LONG_MS = 200.0
"""What a first round has to set up is little against this."""


@dataclass(frozen=True)
class Launched:
    """A round under way: its tokens in flight, and its trees on the device for whoever wants to look at them."""

    flight: Flight
    tree: TreeTensors
    path: AcceptedPaths

    def copied(self) -> "Launched":
        """With tensors of its own, as the next replay of a graph overwrites the graph's."""
        tree = TreeTensors(**{name: tensor.clone() for name, tensor in vars(self.tree).items()})
        path = AcceptedPaths(**{name: tensor.clone() for name, tensor in vars(self.path).items()})
        return Launched(self.flight, tree, path)


class Runner(Protocol):
    """Something that launches rounds.

    Attributes:
        overlaps: whether the next round is launched before this one's tokens are read.
        fills_up: whether prompt chunks of different lengths run together, filled up to one.
    """

    overlaps: bool
    fills_up: bool

    def launch(
        self, slots: list[int], shape: DraftShape, flags: SamplingFlags, context_bound: int, is_timed: bool = False
    ) -> Launched:
        """Launch one round of the sequences in ``slots``.

        Args:
            context_bound: none of them has committed more tokens, as far as the host knows.
            is_timed: `Flight.device_ms` will be asked for, where rounds overlap.
        """
        ...

    def prefill(
        self, slots: list[int], chunks: list[list[int]], kind: PrefillKind, context_bound: int
    ) -> torch.Tensor | None:
        """Commit a chunk of each prompt; see `ddtree.engine.prefill.prefill_chunk`.

        Args:
            chunks: the next prompt tokens of the sequences in ``slots``.
        """
        ...

    def prefill_rows(self, rows: int) -> int:
        """Rows that a chunk is filled up to."""
        ...

    def bucket_of(self, batch: int) -> int:
        """Size that a batch is filled up to, or that its rounds count with."""
        ...

    def prepare(self, bucket: int, shape: DraftShape, flags: SamplingFlags) -> None:
        """Set up all that the first such round would otherwise wait for."""
        ...

    def measure(self, bucket: int, shape: DraftShape, flags: SamplingFlags) -> float:
        """Time of a round over empty sequences, in milliseconds."""
        ...

    def fit(self, shape: DraftShape) -> tuple[DraftShape, str]:
        """The shape that can be had here for the asked one, and why it is another, if it is."""
        ...

    def facts(self) -> dict[str, Any]:
        """How rounds run."""
        ...

    def launch_facts(self) -> dict[str, Any]:
        """How rounds were launched so far, and the graphs that there are; may be called from another thread."""
        ...


class EagerRunner:
    """Launches every operation of a round by itself, and knows all tokens before the next one."""

    overlaps = False
    fills_up = False

    def __init__(self, state: DeviceState, target: Target, drafter: Drafter | None, reason: str = "") -> None:
        self._state, self._target, self._drafter = state, target, drafter
        self._reason = reason

    def launch(
        self,
        slots: list[int],
        shape: DraftShape,
        flags: SamplingFlags,
        context_bound: int,
        is_timed: bool = False,
        constraints: Seq[Constraint] = (),
    ) -> Launched:
        """See `Runner`; only here the host can take part in a round, for ``constraints``."""
        began = time.perf_counter()
        batch = self._state.select(self._state.on_device(slots), flags, context_bound)
        played = decode_round(self._state, batch, self._target, self._drafter, shape, constraints)
        return Launched(Flight(played.packed, played.path.tokens.shape[1], began), played.tree, played.path)

    def prefill(
        self,
        slots: list[int],
        chunks: list[list[int]],
        kind: PrefillKind,
        context_bound: int,
        constraints: Seq[Constraint] = (),
    ) -> torch.Tensor | None:
        """See `Runner`; the chunks have one length."""
        batch = self._state.select(self._state.on_device(slots), kind.flags, context_bound)
        drafter, tokens = self._drafter if kind.drafts else None, self._state.on_device(chunks)
        return prefill_chunk(self._state, batch, self._target, drafter, tokens, kind.is_last, constraints)

    def prefill_rows(self, rows: int) -> int:
        """See `Runner`; chunks run at their own length."""
        return rows

    def bucket_of(self, batch: int) -> int:
        """See `Runner`; batches run at their own size, and count with those up to a power of 2."""
        return 1 << (batch - 1).bit_length()

    def prepare(self, bucket: int, shape: DraftShape, flags: SamplingFlags) -> None:
        """See `Runner`; nothing."""

    def measure(self, bucket: int, shape: DraftShape, flags: SamplingFlags) -> float:
        """See `Runner`; the quicker of two, where they are short: the first of a kind has to set things up."""
        times: list[float] = []
        while len(times) < 2 and sum(times) < LONG_MS:
            began = time.perf_counter()
            self.launch([self._state.spare_slot] * bucket, shape, flags, 1).flight.land()
            times.append(1e3 * (time.perf_counter() - began))
        return min(times)

    def fit(self, shape: DraftShape) -> tuple[DraftShape, str]:
        """See `Runner`; every shape runs."""
        return shape, ""

    def facts(self) -> dict[str, Any]:
        """See `Runner`."""
        return {"graphs": False, "reason": self._reason}

    def launch_facts(self) -> dict[str, Any]:
        """See `Runner`."""
        return {"launch": "eager", "graph_replays": 0, "graphs": []}
