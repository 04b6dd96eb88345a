"""Results on their way from the device to the host."""

from dataclasses import dataclass

import numpy as np
import torch


class Flight:
    """Tokens of a launched piece of work. On a GPU the copy runs behind the work; only `land` waits for it.

    Args:
        packed: int64 ``[batch, 1 + n_tokens + any]``: how many tokens count less one, the tokens, and what else the
            host wants to know.
        n_tokens: tokens of a row.
        launched: `time.perf_counter()` just before the work was launched.
        begun: an event recorded just before the work, where its time on the device is asked for.
    """

    def __init__(
        self, packed: torch.Tensor, n_tokens: int, launched: float, begun: torch.cuda.Event | None = None
    ) -> None:
        self._n_tokens = n_tokens
        self.launched = launched
        self._begun = begun
        self._event: torch.cuda.Event | None = None
        self._host = packed
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event(enable_timing=begun is not None)
            self._event.record()

    def land(self) -> list["Landed"]:
        """Wait, and give what came for each sequence."""
        if self._event is not None:
            self._event.synchronize()
        end = 1 + self._n_tokens
        rows = self._host.numpy()
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
