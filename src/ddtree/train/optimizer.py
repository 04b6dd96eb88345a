"""Muon for matrices and AdamW for the rest, or AdamW for all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ddtree.train.settings import Optimization

MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.95)
# Coefficients of the quintic iteration of https://kellerjordan.github.io/posts/muon.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon:
    """Momentum, made orthogonal by Newton-Schulz iterations, for matrices.

    The update is scaled by ``0.2 * sqrt(max(rows, columns))``, so that its size is like AdamW's (arXiv 2502.16982).
    Matrices of one shape are worked on together.

    Args:
        matrices: parameters of two axes.
        rate: peak learning rate.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], rate: float, weight_decay: float) -> None:
        self._rate, self._weight_decay = rate, weight_decay
        groups: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for matrix in matrices:
            groups.setdefault(matrix.shape, []).append(matrix)
        self._groups = list(groups.values())
        self._momenta = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self._groups]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Change the matrices by their gradients; ``scale`` is the part of the peak rate that the schedule allows."""
        rate = self._rate * scale
        for group, momentum in zip(self._groups, self._momenta, strict=True):
            gradient = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonal(gradient.lerp(momentum, MOMENTUM)).float()
            step = rate * 0.2 * math.sqrt(max(update.shape[1:]))
            weights: list[torch.Tensor] = list(group)
            torch._foreach_mul_(weights, 1 - rate * self._weight_decay)
            torch._foreach_add_(weights, list(update.unbind()), alpha=-step)

    def state(self) -> list[torch.Tensor]:
        """What a resumed run needs."""
        return self._momenta

    def restore(self, state: list[torch.Tensor]) -> None:
        for momentum, saved in zip(self._momenta, state, strict=True):
            if saved.shape != momentum.shape:
                raise ValueError(f"momenta are {list(saved.shape)}, not {list(momentum.shape)}")
            momentum.copy_(saved)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Nearly the nearest orthogonal matrices: singular values come to lie around 1.

    Args:
        matrices: ``[n, rows, columns]``. On a GPU the products are bfloat16, elsewhere float32.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    x = x / (x.float().flatten(1).norm(dim=1)[:, None, None] + 1e-12).to(x.dtype)
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.mT if is_tall else x


class Optimizer:
    """Both optimizers as one, with the clipping of gradients and the rate of the schedule."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], options: Optimization) -> None:
        self._options, self._parameters = options, list(parameters)
        matrices = [p for p in self._parameters if p.dim() == 2]
        vectors = [p for p in self._parameters if p.dim() != 2]
        self._muon: Muon | None = None
        groups = [{"params": vectors, "lr": options.vector_rate, "weight_decay": 0.0}]
        if options.optimizer == "muon":
            self._muon = Muon(matrices, options.matrix_rate, options.weight_decay)
        else:
            groups.append({"params": matrices, "lr": options.matrix_rate, "weight_decay": options.weight_decay})
        self._peaks = [options.vector_rate, options.matrix_rate][: len(groups)]
        is_cuda = self._parameters[0].is_cuda
        self._adam = torch.optim.AdamW(groups, betas=ADAM_BETAS, fused=is_cuda)

    def step(self, progress: float) -> torch.Tensor:
        """Change the weights by their gradients and forget these.

        Args:
            progress: share of the run that is done, 0 to 1.

        Returns:
            length of the gradient before it was clipped; on the device, so that nobody waits for it.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._options.clip_norm)
        scale = rate_scale(progress, self._options.warm_up_share, self._options.final_share)
        if self._muon is not None:
            self._muon.step(scale)
        for group, peak in zip(self._adam.param_groups, self._peaks, strict=True):
            group["lr"] = peak * scale
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        for parameter in self._parameters:
            parameter.grad = None
        return norm

    def state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"adam": self._adam.state_dict(), "muon": self._muon.state() if self._muon else []}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._adam.load_state_dict(state["adam"])
        if self._muon is not None:
            self._muon.restore(state["muon"])


def rate_scale(progress: float, warm_up_share: float, final_share: float) -> float:
    """Part of the peak learning rate: a straight rise, then a cosine down to ``final_share``, which is also the least.

    Args:
        progress: 0 at the first step, 1 at the end.
    """
    if progress < warm_up_share:
        return max(progress / warm_up_share, final_share)
    fall = (min(progress, 1.0) - warm_up_share) / max(1 - warm_up_share, 1e-9)
    return final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * fall))
