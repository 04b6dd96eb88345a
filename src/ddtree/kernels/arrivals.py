"""Counters by which the last block of a kernel to arrive knows that it is the last."""

from functools import cache

import torch


def arrival_counters(kernel: str, n: int, device: torch.device) -> torch.Tensor:
    """At least ``n`` int32 zeros, which ``kernel`` leaves as zeros; made once, so that no launch has to clear them."""
    return _made(kernel, 1 << (n - 1).bit_length(), device)


@cache
def _made(kernel: str, n: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32, device=device)
