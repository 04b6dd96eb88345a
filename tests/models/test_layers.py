"""Layers hand the normed stream on from kernel to kernel, where kernels make it: always the norm that comes next."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from ddtree.kernels.kernel_set import TWINS  # noqa: E402
from ddtree.kernels.norm import rms_norm  # noqa: E402
from ddtree.kernels.placement import Placement  # noqa: E402
from ddtree.models.layer import LayerWeights, Pass, run_layers  # noqa: E402
from ddtree.models.target_config import LayerShape  # noqa: E402

HIDDEN, MIDDLE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 24, 40, 3, 1, 8, 4
SHAPE = LayerShape(HIDDEN, MIDDLE, HEADS, KV_HEADS, HEAD_DIM, 1e-5, True, True, True, True)


def random_layer() -> LayerWeights:
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    draw = torch.randn
    return LayerWeights(
        draw(HIDDEN), draw(qkv, HIDDEN), draw(qkv), draw(HEAD_DIM), draw(HEAD_DIM), draw(HIDDEN, HEADS * HEAD_DIM),
        draw(HIDDEN), draw(HIDDEN), draw(2 * MIDDLE, HIDDEN), draw(2 * MIDDLE), draw(HIDDEN, MIDDLE), draw(HIDDEN),
    )  # fmt: skip


class NormingKernels:
    """Sums come with the next norm, and who is given a normed stream reads nothing else."""

    def __init__(self) -> None:
        self.handed = 0
        self.kernels = replace(
            TWINS, add_linear=self.add_linear, attend_input=self.attend_input, feed_forward_input=self.feed_forward
        )

    def add_linear(self, stream, x, weight, bias, tap=None, next_norm=None, eps=0.0):
        TWINS.add_linear(stream, x, weight, bias, tap)
        return rms_norm(stream, next_norm, eps)

    def attend_input(self, stream, norm, eps, weight, bias, head_dim, q_norm, k_norm, cos, sin, cache, slots, normed):
        normed = self._read(normed, stream, norm, eps)
        product = TWINS.linear(normed, weight, bias)
        return TWINS.rotate_and_write(product, head_dim, q_norm, k_norm, eps, cos, sin, cache, slots)

    def feed_forward(self, stream, norm, eps, weight, bias, normed):
        return TWINS.silu_mul(TWINS.linear(self._read(normed, stream, norm, eps), weight, bias))

    def _read(self, normed, stream, norm, eps):
        self.handed += normed is not None
        return rms_norm(stream, norm, eps) if normed is None else normed


@pytest.mark.parametrize("taps", [(), (0,), (1, 3), (3, 0, 0)], ids=str)
def test_the_norm_that_comes_next_is_handed_on(taps: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    batch, rows, slots = 2, 5, 16
    layers, final_norm = [random_layer() for _ in range(LAYERS)], torch.randn(HIDDEN)
    stream, angle = torch.randn(batch, rows, HIDDEN), torch.randn(batch, rows, HEAD_DIM // 2)
    place = Placement(torch.arange(batch * rows).view(batch, rows), angle.cos(), angle.sin())
    run = Pass(place, lambda query, keys, values, window: query.flatten(2) * keys.mean() + values.mean())
    norming, outcomes = NormingKernels(), []
    for kernels in (TWINS, norming.kernels):
        cache = torch.zeros(LAYERS, 2, slots, KV_HEADS, HEAD_DIM)
        last, tapped = run_layers(
            stream.clone(), layers, final_norm, SHAPE, run, cache, (None,) * LAYERS, kernels, taps
        )
        outcomes.append((last, tapped, cache))
    for got, want in zip(outcomes[1], outcomes[0], strict=True):
        torch.testing.assert_close(got, want)
    assert norming.handed == 2 * LAYERS - 1  # all but the first layer's first, and the last one ends the pass
