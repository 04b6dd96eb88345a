"""The sampling noise: Gumbel distributed, and a function of (seed, position, token) alone."""

import numpy as np
import torch
from scipy import stats

from ddtree.kernels.noise import gumbel_noise, seed_key


def keys(*seeds):
    return torch.tensor([seed_key(s) for s in seeds], dtype=torch.int32)


def test_noise_is_gumbel_distributed():
    sample = gumbel_noise(keys(1), torch.arange(40)[None], 5000).numpy().ravel()
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-3
    assert np.isfinite(sample).all()


def test_noise_does_not_depend_on_batch_rows_or_vocabulary_size():
    alone = gumbel_noise(keys(7), torch.tensor([[12]]), 100)[0, 0]
    among = gumbel_noise(keys(3, 7), torch.tensor([[4, 5, 12], [12, 12, 9]]), 200)
    torch.testing.assert_close(among[1, 0, :100], alone, rtol=0, atol=0)
    torch.testing.assert_close(among[1, 1, :100], alone, rtol=0, atol=0)


def test_seeds_positions_and_tokens_are_uncorrelated():
    n = 20000
    base = gumbel_noise(keys(5), torch.tensor([[100]]), n)[0, 0]
    others = {
        "next seed": gumbel_noise(keys(6), torch.tensor([[100]]), n)[0, 0],
        "seed that differs in its high word": gumbel_noise(keys(5 + 2**40), torch.tensor([[100]]), n)[0, 0],
        "next position": gumbel_noise(keys(5), torch.tensor([[101]]), n)[0, 0],
        "next token": base.roll(1),
        "position and token exchanged": gumbel_noise(keys(5), torch.arange(n)[None], 101)[0, :, 100],
    }
    for name, other in others.items():
        correlation = np.corrcoef(base.numpy(), other.numpy())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(n), name


def test_neighbouring_seeds_draw_from_the_right_law():
    """Gumbel-max over consecutive seeds and one position: the law of the drawn token is the softmax."""
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5])
    noise = gumbel_noise(keys(*range(20000)), torch.full((20000, 1), 17), 4)[:, 0]
    counts = np.bincount((logits + noise).argmax(-1).numpy(), minlength=4)
    assert stats.chisquare(counts, logits.double().softmax(0).numpy() * 20000).pvalue > 1e-3
