"""Muon's updates are orthogonal, AdamW takes the rest, and rates follow the schedule."""

from __future__ import annotations

import math

import pytest
import torch

from ddtree.train.optimizer import Muon, Optimizer, orthogonal, rate_scale
from ddtree.train.settings import Optimization


@pytest.mark.parametrize("shape", [(6, 6), (4, 11), (11, 4)])
def test_orthogonal_brings_singular_values_near_one_and_keeps_directions(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    made = orthogonal(matrices)
    for before, after in zip(matrices, made, strict=True):
        u, _, vh = torch.linalg.svd(before, full_matrices=False)
        in_the_same_basis = u.T @ after @ vh.T
        values = in_the_same_basis.diagonal()
        assert values.min() > 0.6 and values.max() < 1.3
        assert (in_the_same_basis - torch.diag(values)).abs().max() < 1e-4


def test_muon_moves_by_rate_whatever_the_gradients_size() -> None:
    moves = []
    for size in (1e-3, 1e3):
        matrix = torch.nn.Parameter(torch.zeros(4, 6))
        matrix.grad = size * torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        Muon([matrix], rate=0.1, weight_decay=0.0).step(scale=0.5)
        moves.append(matrix.detach().clone())
    torch.testing.assert_close(moves[0], moves[1], rtol=1e-3, atol=1e-6)
    norm = float(moves[0].norm())  # four singular values near 1, times rate and 0.2 * sqrt(6)
    assert norm == pytest.approx(0.1 * 0.5 * 0.2 * math.sqrt(6) * 2, rel=0.25)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_all_parameters_learn(name: str) -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(5, 5)), torch.nn.Parameter(torch.randn(5, 3)),
                  torch.nn.Parameter(torch.randn(5))]  # fmt: skip
    wanted = [torch.randn_like(p) for p in parameters]
    options = Optimization(optimizer=name, matrix_rate=0.05, vector_rate=0.05, weight_decay=0.0)  # type: ignore[arg-type]
    optimizer = Optimizer(parameters, options)

    def losses() -> torch.Tensor:
        return torch.stack([(p - w).square().mean() for p, w in zip(parameters, wanted, strict=True)])

    before = losses().detach()
    for step in range(300):
        losses().sum().backward()
        optimizer.step(step / 300)
        assert all(p.grad is None for p in parameters)
    assert (losses() < 0.3 * before).all()


def test_a_step_tells_the_gradients_length_before_it_was_clipped() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 10.0)
    assert float(Optimizer([parameter], Optimization()).step(0.5)) == pytest.approx(20.0)


def test_rates_rise_straight_and_fall_as_a_cosine() -> None:
    assert rate_scale(0.0, 0.1, 0.02) == pytest.approx(0.02)
    assert rate_scale(0.05, 0.1, 0.02) == pytest.approx(0.5)
    assert rate_scale(0.1, 0.1, 0.02) == pytest.approx(1.0)
    assert rate_scale(0.55, 0.1, 0.02) == pytest.approx(0.51)
    assert rate_scale(1.0, 0.1, 0.02) == pytest.approx(0.02)
    assert rate_scale(1.5, 0.1, 0.02) == pytest.approx(0.02)
    assert rate_scale(0.0, 0.0, 0.0) == 1.0
