"""Products of large weights in CUDA C++ against exact sums: on a Hopper GPU as they are, else by g++.

Inputs are small whole numbers, so that every sum is exact in whatever order it is made: results are equal to the bit.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from ddtree.kernels.layer_products import feed_forward_input  # noqa: E402
from ddtree.kernels.tensor_map import TensorMap, tensor_map  # noqa: E402
from ddtree.kernels.wide_products_cuda import multiply  # noqa: E402
from ddtree.kernels.wide_tiling import WideTile  # noqa: E402
from devices import DEVICE, GPU  # noqa: E402

if GPU and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("not a Hopper GPU", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("wide_products")
PLAIN = WideTile(64, 64, stages=2, by="wgmma")  # two stages: every one is filled several times
TILES = {
    "plain": PLAIN,
    "deep": replace(PLAIN, depth=128),
    "three warpgroups": replace(PLAIN, columns=192),
    "one of three stages": replace(PLAIN, columns=128, stages=3, calls_late=True),
    "split": replace(PLAIN, splits=3),
    "split and joined": replace(PLAIN, splits=3, joined=True),
    "joined, three warpgroups": replace(PLAIN, columns=192, splits=2, joined=True),
}
COLUMNS = 384
CASES = [
    pytest.param(tile, rows, 128 * steps if tile.depth == 128 else 64 * steps, id=f"{name}, {rows} rows, {steps} steps")
    for name, tile in TILES.items()
    for rows, steps in (
        ((1, 5), (16, 5), (65, 5), (128, 7), (136, 5)) if GPU else ((9, 5), (72, 7)) if tile.splits > 1 else ((9, 5),)
    )
]


def whole(*shape: int, most: int = 3) -> torch.Tensor:
    return torch.randint(-most, most + 1, shape, device=DEVICE).bfloat16()


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    total = x.double() @ weight.double().T
    return total if bias is None else total + bias.double()


@pytest.mark.parametrize(("tile", "rows", "size"), CASES)
@pytest.mark.parametrize("dressed", [False, True], ids=["bare", "bias, stream and tap"])
def test_product(tile: WideTile, rows: int, size: int, dressed: bool, written_before: Callable[..., None]) -> None:
    torch.manual_seed(0)
    x, weight = whole(rows, size), whole(COLUMNS, size)
    written_before(x)
    assert tile.fits(rows, COLUMNS, size, False)
    if not dressed:
        got = multiply(tile, x, weight, None)
        if tile.leaves_sums:
            stretch = -(-(size // tile.depth) // tile.splits) * tile.depth
            parts = [exact(x[:, at : at + stretch], weight[:, at : at + stretch]) for at in range(0, size, stretch)]
            assert torch.equal(got, torch.stack(parts).float())
        else:
            assert torch.equal(got, exact(x, weight).bfloat16())
        return
    bias, stream, taps = whole(COLUMNS), whole(rows, COLUMNS, most=50), torch.zeros(rows, 3, COLUMNS, device=DEVICE)
    taps, before = taps.bfloat16(), stream.clone()
    written_before(x, stream)
    got = multiply(tile, x, weight, bias, stream=stream, tap=taps[:, 1])
    if tile.leaves_sums:  # all that is left to the kernel behind
        assert torch.equal(got.sum(0), exact(x, weight).float()) and torch.equal(stream, before) and not taps.any()
        return
    assert got is stream
    assert torch.equal(stream, (exact(x, weight, bias) + before.double()).bfloat16())
    assert torch.equal(taps[:, 1], stream) and not taps[:, ::2].any()


@pytest.mark.parametrize(("tile", "rows", "size"), CASES)
@pytest.mark.parametrize("biased", [False, True])
def test_gated_product(tile: WideTile, rows: int, size: int, biased: bool, written_before: Callable[..., None]) -> None:
    torch.manual_seed(0)
    x, weight, bias = whole(rows, size, most=1), whole(COLUMNS, size, most=1), whole(COLUMNS) if biased else None
    written_before(x)
    assert tile.fits(rows, COLUMNS, size, True)
    got = multiply(tile, x, weight, bias, gated=True)
    if tile.leaves_sums:
        assert torch.equal(got.sum(0), exact(x, weight).float())
        return
    gate, up = exact(x, weight, bias).bfloat16().chunk(2, -1)
    want = (torch.nn.functional.silu(gate.float()).bfloat16() * up).float()
    assert got.shape == want.shape
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-6)  # exp may differ in its last bit
    assert (got.float() == want).float().mean() > 0.99


def test_gate_rounds_as_the_twin_does() -> None:
    torch.manual_seed(0)
    rows, size = 5, 128
    stream, weight = torch.randn(1, rows, size, device=DEVICE).bfloat16(), torch.randn(128, size, device=DEVICE)
    ones = torch.ones(size, device=DEVICE).bfloat16()
    weight = (weight * size**-0.5).bfloat16()
    want = feed_forward_input(stream, ones, 1e-5, weight, None)[0]
    x = stream[0].float()
    x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
    got = multiply(PLAIN, x, weight, None, gated=True)
    assert (got.float() - want.float()).norm() < 2e-3 * want.float().norm()


def test_joined_stretches_are_added_in_ascending_order() -> None:
    """The last stretch takes away the two before, so that only what rounding did is left: it tells orders apart."""
    torch.manual_seed(0)
    (a, b), (u, v) = (torch.randn(2, n, 64, device=DEVICE).bfloat16() for n in (20, 64))
    x = torch.cat([a, torch.zeros_like(a), b, torch.zeros_like(b), a, b], -1)
    weight = torch.cat([u, torch.zeros_like(u), v, torch.zeros_like(v), -u, -v], -1)
    first, second, third = multiply(TILES["split"], x, weight, None)
    want = (first + second + third).bfloat16()
    assert torch.equal(multiply(TILES["split and joined"], x, weight, None), want)
    for other in (third + second + first, third + first + second):
        assert not torch.equal(other.bfloat16(), want)


def test_maps_are_made_once_for_a_place_and_a_shape() -> None:
    weight = whole(64, 128)
    first = tensor_map(weight, 64, 128)
    assert isinstance(first, TensorMap) and any(first.words)
    assert tensor_map(weight.view(64, 128), 64, 128) is first
    assert tensor_map(weight, 32, 128) is not first and tensor_map(weight.view(128, 64), 64, 128) is not first
