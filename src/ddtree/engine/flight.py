"""Results on their way from the device to the host."""

from dataclasses import dataclass

import torch


class Flight:
    """Tokens of a launched piece of work. On a GPU the copy runs behind the work; only `land` waits for it.

    Args:
        packed: int64 ``[batch, 1 + n_tokens + any]``: how many tokens count less one, the tokens, and what else the
            host wants to know.
        n_tokens: tokens of a row.
        launched: `time.perf_counter()` just before the work was launched.
    """

    def __init__(self, packed: torch.Tensor, n_tokens: int, launched: float) -> None:
        self._n_tokens = n_tokens
        self.launched = launched
        self._event: torch.cuda.Event | None = None
        self._host = packed
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def land(self) -> list["Landed"]:
        """Wait, and give what came for each sequence."""
        if self._event is not None:
            self._event.synchronize()
        end = 1 + self._n_tokens
        return [Landed(row[1 : row[0] + 2], row[0], row[end:]) for row in self._host.tolist()]


@dataclass(frozen=True)
class Landed:
    """One sequence's part of a flight: its new tokens, how many nodes were accepted, and the rest of its row."""

    tokens: list[int]
    accepted: int
    extra: list[int]


def pack(accepted: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """``[batch]`` and ``[batch, n]`` as a `Flight` wants them."""
    return torch.cat((accepted[:, None], tokens), dim=1)
