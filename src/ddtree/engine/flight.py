"""Results on their way from the device to the host."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

_LEFT_OVER: list[torch.Tensor] = []
"""Pieces of dropped flights, few and small, kept for good: the device may yet write to them, and the allocator, which
sees torch's own copies alone, would hand them to others."""


class HostMemory:
    """Pinned memory that results land in, one piece for each flight under way.

    Args:
        hand_over: see `ddtree.kernels.advance.hand_over`.
    """

    def __init__(self, hand_over: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self._hand_over = hand_over
        self._free: dict[torch.Size, list[torch.Tensor]] = {}
        self._in_use: dict[int, torch.Tensor] = {}  # by address

    def __del__(self) -> None:
        _LEFT_OVER.extend(self._in_use.values())

    def fetch(self, packed: torch.Tensor) -> torch.Tensor:
        """A piece that ``packed`` is on its way to."""
        free = self._free.setdefault(packed.shape, [])
        piece = free.pop() if free else torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._in_use[piece.data_ptr()] = piece
        self._hand_over(packed, piece)
        return piece

    def give_back(self, piece: torch.Tensor) -> None:
        """Nothing is on its way to it any more, and nobody reads it."""
        self._free[piece.shape].append(self._in_use.pop(piece.data_ptr()))


class Flight:
    """Tokens of a launched piece of work. On a GPU the copy runs behind the work; only `land` waits for it.

    Args:
        packed: int64 ``[batch, 1 + n_tokens + any]``: how many tokens count less one, the tokens, and what else the
            host wants to know.
        n_tokens: tokens of a row.
        launched: `time.perf_counter()` just before the work was launched.
        memory: where it lands; else in memory of its own, by the copy engine, which takes longer.
        begun: an event recorded just before the work, where its time on the device is asked for.
    """

    def __init__(
        self,
        packed: torch.Tensor,
        n_tokens: int,
        launched: float,
        memory: HostMemory | None = None,
        begun: torch.cuda.Event | None = None,
    ) -> None:
        self._n_tokens = n_tokens
        self.launched = launched
        self._begun = begun
        self._event: torch.cuda.Event | None = None
        self._memory = memory
        self._host: torch.Tensor | None = packed
        if memory is not None:
            self._host = memory.fetch(packed)
        elif packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
        if packed.device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=begun is not None)
            self._event.record()

    def land(self) -> list["Landed"]:
        """Wait, and give what came for each sequence; to be called once."""
        assert self._host is not None, "it has landed"
        if self._event is not None:
            self._event.synchronize()
        rows, end = self._host.numpy(), 1 + self._n_tokens
        if self._memory is not None:
            rows = rows.copy()
            self._memory.give_back(self._host)
            self._host = None  # another flight's from now on
        return [
            Landed(row[1 : row[0] + 2], row[0], extra)
            for row, extra in zip(rows[:, :end].tolist(), rows[:, end:], strict=True)
        ]

    def device_ms(self) -> float | None:
        """After the landing: how long the device worked, whatever the host did meanwhile; None where nobody asked."""
        return self._begun.elapsed_time(self._event) if self._begun is not None and self._event is not None else None


@dataclass(frozen=True)
class Landed:
    """One sequence's part of a flight: its new tokens, how many nodes were accepted, the rest of its row (int64)."""

    tokens: list[int]
    accepted: int
    extra: np.ndarray


def pack(accepted: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """``[batch]`` and ``[batch, n]`` as a `Flight` wants them."""
    return torch.cat((accepted[:, None], tokens), dim=1)
