"""Top-k over the vocabulary with ties settled by token id."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.kernels.top_log_probs import top_log_probs


def by_sorting(logits, k):
    """NumPy, float64: sort by descending logit, then ascending id."""
    order = np.lexsort((np.arange(logits.shape[-1]), -logits.astype(np.float64)))[:k]
    shifted = logits.astype(np.float64) - logits.max()
    return shifted[order] - np.log(np.exp(shifted).sum()), order


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), vocab=st.integers(1, 60), k=st.integers(1, 60), coarse=st.booleans())
def test_equals_sorting(seed, vocab, k, coarse):
    k = min(k, vocab)
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, 3, vocab)).astype(np.float32) * 3
    if coarse:
        logits = np.round(logits)  # many equal logits, -0.0 among them
    values, ids = top_log_probs(torch.from_numpy(logits), k)
    for b in range(2):
        for d in range(3):
            expected, order = by_sorting(logits[b, d], k)
            np.testing.assert_array_equal(ids[b, d].numpy(), order)
            np.testing.assert_allclose(values[b, d].numpy(), expected, rtol=0, atol=2e-6)
    assert values.dtype == torch.float32 and ids.dtype == torch.int64
    assert (values <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_equal_logits_take_the_lowest_ids(dtype):
    _, ids = top_log_probs(torch.full((1, 1, 1000), -3.0, dtype=dtype), 5)
    assert ids.flatten().tolist() == [0, 1, 2, 3, 4]


def test_sharpness_is_of_each_sequence_and_is_a_temperature():
    logits = torch.randn(3, 2, 500) * 3
    sharpness = torch.tensor([1.0, 1.25, 0.5])
    values, ids = top_log_probs(logits, 20, sharpness)
    for b, temperature in enumerate((1.0, 0.8, 2.0)):
        for d in range(2):
            expected, order = by_sorting(logits[b, d].numpy().astype(np.float64) / temperature, 20)
            np.testing.assert_array_equal(ids[b, d].numpy(), order)
            np.testing.assert_allclose(values[b, d].numpy(), expected, rtol=0, atol=4e-6)
    assert torch.equal(values[0], top_log_probs(logits, 20)[0][0])


def test_sharpness_changes_no_order():
    """The order is that of the logits themselves, however close together sharpness brings them."""
    logits = torch.tensor([[[100.0, 100.5, 100.5, 99.5, -torch.inf]]], dtype=torch.bfloat16)
    values, ids = top_log_probs(logits, 5, torch.tensor([1e-3]))
    assert ids.flatten().tolist() == [1, 2, 0, 3, 4]
    assert values[0, 0, 4] == -torch.inf and bool((values[0, 0, 1:] <= values[0, 0, :-1]).all())
