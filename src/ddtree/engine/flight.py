"""Results on their way from the device to the host."""

import torch


class Flight:
    """Tokens of a launched piece of work. On a GPU the copy runs behind the work; only `land` waits for it.

    Args:
        packed: int64 ``[batch, 1 + n]``: how many tokens count less one, then the tokens.
        launched: `time.perf_counter()` just before the work was launched.
    """

    def __init__(self, packed: torch.Tensor, launched: float) -> None:
        self.launched = launched
        self._event: torch.cuda.Event | None = None
        self._host = packed
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def land(self) -> list[list[int]]:
        """Wait, and give each sequence's tokens."""
        if self._event is not None:
            self._event.synchronize()
        return [row[1 : row[0] + 2] for row in self._host.tolist()]


def pack(accepted: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """``[batch]`` and ``[batch, n]`` as a `Flight` wants them."""
    return torch.cat((accepted[:, None], tokens), dim=1)
