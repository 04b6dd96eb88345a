"""Whether the parts of a training step are compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch

Part = Callable[..., torch.Tensor]
Wrap = Callable[[Part], Part]


def plain(part: Part) -> Part:
    """The part as it is written."""
    return part


def compiled(part: Part) -> Part:
    """The part by torch.compile; every shape is fixed, so that each is compiled once."""
    return torch.compile(part, dynamic=False)


def choose_wrap(device: torch.device) -> Wrap:
    """Compiled on a GPU, where flex attention would otherwise be computed in full; plain on a CPU, where it has no
    backward pass.
    """
    return compiled if device.type == "cuda" else plain
