"""What `benchmarks/sglang_h200/exact_draws.py` calls exact is SGLang's law, and a fault shows in its tests."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks/sglang_h200"


@pytest.fixture(scope="module")
def exact():
    sys.path.insert(0, str(FOLDER))
    try:
        import exact_draws

        yield exact_draws
    finally:
        sys.path.remove(str(FOLDER))


class Telling:
    """A server that tells the first ``most`` log-probabilities of one distribution after any context."""

    def __init__(self, probabilities: np.ndarray, most: int | None = None) -> None:
        self.log_probs, self.most = np.log(probabilities), most

    def generate(self, context, asked, **sampling):
        best = np.argsort(-self.log_probs, kind="stable")[: min(self.most or 1 << 30, asked["top_logprobs_num"])]
        rows = [[float(self.log_probs[token]), int(token), None] for token in best]
        return SimpleNamespace(meta={"output_top_logprobs": [rows]})


def test_top_p_counts_the_whole_vocabulary(exact) -> None:
    """0.799 of all is before the third token, which is above 0.8 of what the best 400 sum to: it stays all the same."""
    probabilities = np.concatenate([[0.5, 0.299, 0.1, 0.0945], np.full(996, 0.0065 / 996)])
    law, margin = exact.next_law(Telling(probabilities), [], {"temperature": 1.0, "top_p": 0.8}, 1000)
    assert law == pytest.approx({0: 0.5 / 0.899, 1: 0.299 / 0.899, 2: 0.1 / 0.899})
    assert margin == pytest.approx(0.001)
    assert 0.799 / probabilities[:400].sum() > 0.8


def test_a_part_of_the_distribution_is_refused(exact) -> None:
    server = Telling(np.full(1000, 0.001), most=400)
    with pytest.raises(ValueError, match="not the whole vocabulary"):
        exact.next_law(server, [], {"temperature": 0.8, "top_p": 0.8}, 1000)


def test_temperature_comes_before_the_filters(exact) -> None:
    law, _ = exact.next_law(Telling(np.array([0.6, 0.3, 0.1])), [], {"temperature": 0.5, "top_k": 2}, 3)
    assert law == pytest.approx({0: 0.36 / 0.45, 1: 0.09 / 0.45})


def test_draws_of_another_law_do_not_fit(exact) -> None:
    law = {(1,): 0.5, (2,): 0.3, (3,): 0.2}
    assert exact.fit(Counter({(1,): 500, (2,): 300, (3,): 200}), law)["p"] == pytest.approx(1.0)
    off = exact.fit(Counter({(1,): 420, (2,): 360, (3,): 213, (4,): 7}), law)
    assert off["p"] < 1e-4
    assert off["outside_the_law"] == 7


def test_draws_of_two_laws_are_not_alike(exact) -> None:
    one = Counter({(1,): 500, (2,): 300, (3,): 195, (4,): 5})
    assert exact.alike(one, one) == pytest.approx(1.0)
    assert exact.alike(one, Counter({(1,): 420, (2,): 380, (3,): 200})) < 1e-3
