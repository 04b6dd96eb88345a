"""The choice that simulates acceptance in measurements of shapes, against its slow twin."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from ddtree.kernels.tree_build import build_tree  # noqa: E402
from devices import DEVICE, needs_triton  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from shapes import simulate_slowly  # noqa: E402

VOCAB, DEPTHS, RANKS = 1000, 5, 8


@needs_triton
@pytest.mark.parametrize("accepted", [0, 3, 9])
@pytest.mark.parametrize(("batch", "budget", "deepest"), [(1, 15, 5), (2, 40, 4), (2, 40, 1)])  # dead rows in the last
def test_simulate(batch: int, budget: int, deepest: int, accepted: int) -> None:
    from simulated_choice_triton import simulate

    torch.manual_seed(0)
    log_probs = torch.randn(batch, DEPTHS, RANKS, device=DEVICE).log_softmax(-1).sort(-1, descending=True).values
    ids = torch.randint(0, VOCAB, log_probs.shape, device=DEVICE)
    roots, room = torch.zeros(batch, dtype=torch.int64, device=DEVICE), torch.full((batch,), deepest, device=DEVICE)
    tree = build_tree(log_probs, ids, roots, budget, room)
    real = torch.randint(0, VOCAB, (batch, budget + 1), device=DEVICE)
    assert torch.equal(simulate(real, tree, accepted, VOCAB), simulate_slowly(real, tree, accepted, VOCAB))


def test_the_best_child_is_chosen_down_to_a_depth() -> None:
    """Every row above that depth goes to its likeliest child; all others to no child of theirs."""
    log_probs = torch.tensor([[[-0.1, -1.0], [-0.2, -3.0], [-0.3, -4.0]]])
    ids = torch.tensor([[[1, 2], [3, 4], [5, 6]]])
    tree = build_tree(log_probs, ids, torch.zeros(1).long(), 6, torch.full((1,), 3))
    real = torch.zeros(1, 7, dtype=torch.int64)
    chosen = simulate_slowly(real, tree, 2, VOCAB)[0]
    root, first, second = 0, *(int((tree.tokens[0] == token).nonzero()[0]) for token in (1, 3))
    assert (chosen[root], chosen[first], chosen[second]) == (1, 3, 1)  # 1 is what comes behind the real choice, 0
