"""The fused products of a layer against their twins: on a GPU as they are, else compiled for the CPU by g++."""

from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from ddtree.kernels import layer_products as twins  # noqa: E402
from ddtree.kernels import layer_products_cuda as fused  # noqa: E402
from ddtree.kernels.product_tiling import (  # noqa: E402
    _MEASURED,
    _ROW_BUCKETS,
    Chip,
    Tiling,
    tiling,
    tilings,
    warps_for,
)

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
HIDDEN, MIDDLE, HEAD_DIM, HEADS, KV_HEADS = 576, 1536, 64, 9, 3
ROWS = [1, 8, 9, 17, 33, 65, 130] if GPU else [1, 9, 20]


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """CUDA C++ kernels run on the GPU, or compiled for the CPU."""
    torch.manual_seed(0)
    if not GPU:
        monkeypatch.setattr("ddtree.kernels.layer_products_cuda.cuda_module", request.getfixturevalue("cpu_modules"))
    yield


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Sums of another order, rounded to bf16: single numbers may be a step or two apart, all together hardly."""
    assert not got.isnan().any()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error < 3e-3, float(error)


def small_shape() -> tuple[int, int]:
    """Hidden and middle size; the emulator is slow, so it takes less than SmolLM2's."""
    return (HIDDEN, MIDDLE) if GPU else (192, 288)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_attend_input(rows: int, normed: bool, biased: bool, written_before: Callable[..., None]) -> None:
    hidden, slots = small_shape()[0], 200
    heads, kv_heads = (HEADS, KV_HEADS) if GPU else (2, 1)
    columns = (heads + 2 * kv_heads) * HEAD_DIM
    stream, norm = draw(1, rows, hidden), draw(hidden)
    written_before(stream)
    weight, bias = draw(columns, hidden, scale=hidden**-0.5), draw(columns) if biased else None
    q_norm, k_norm = draw(2, HEAD_DIM) if normed else (None, None)
    angle = torch.randn(1, rows, HEAD_DIM // 2, device=DEVICE)
    places = torch.randperm(slots, device=DEVICE)[:rows].view(1, rows)
    cache = draw(2, slots, kv_heads, HEAD_DIM)
    results = []
    for kernel in (twins.attend_input, fused.attend_input):
        own = cache.clone()
        query = kernel(
            stream, norm, 1e-5, weight, bias, HEAD_DIM, q_norm, k_norm, angle.cos(), angle.sin(), own, places
        )
        results.append((query, own))
    close(results[1][0], results[0][0])
    close(results[1][1], results[0][1])
    untouched = torch.ones(slots, dtype=torch.bool, device=DEVICE)
    untouched[places] = False
    assert torch.equal(results[1][1][:, untouched], cache[:, untouched])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_feed_forward_input(rows: int, biased: bool, written_before: Callable[..., None]) -> None:
    hidden, middle = small_shape()
    stream, norm = draw(1, rows, hidden), draw(hidden)
    written_before(stream)
    weight, bias = draw(2 * middle, hidden, scale=hidden**-0.5), draw(2 * middle) if biased else None
    arguments = (stream, norm, 1e-5, weight, bias)
    close(fused.feed_forward_input(*arguments), twins.feed_forward_input(*arguments))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size_of", ["hidden", "middle"])
@pytest.mark.parametrize("tapped", [False, True])
def test_add_linear(rows: int, size_of: str, tapped: bool, written_before: Callable[..., None]) -> None:
    hidden, middle = small_shape()
    size = hidden if size_of == "hidden" else middle
    stream, x = draw(1, rows, hidden), draw(1, rows, size)
    weight, bias = draw(hidden, size, scale=size**-0.5), draw(hidden) if tapped else None
    results = []
    for kernel in (twins.add_linear, fused.add_linear):
        own, taps = stream.clone(), torch.zeros(1, rows, 3 * hidden, dtype=stream.dtype, device=DEVICE)
        tap = taps[..., hidden : 2 * hidden] if tapped else None
        written_before(own, x)
        kernel(own, x, weight, bias, tap)
        results.append((own, taps))
    close(results[1][0], results[0][0])
    if tapped:
        assert torch.equal(results[1][1][..., hidden : 2 * hidden], results[1][0])
        assert not results[1][1][..., :hidden].any() and not results[1][1][..., 2 * hidden :].any()


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    hidden, middle = small_shape()
    stream, norm, x = draw(1, ROWS[-1], hidden), draw(hidden), draw(1, ROWS[-1], middle)
    gate_up, down = draw(2 * middle, hidden, scale=hidden**-0.5), draw(hidden, middle, scale=middle**-0.5)
    all_gated = fused.feed_forward_input(stream, norm, 1e-5, gate_up, None)
    all_added = stream.clone()
    fused.add_linear(all_added, x, down, None)
    for rows in ROWS:
        some = stream[:, :rows].clone()
        assert torch.equal(fused.feed_forward_input(some, norm, 1e-5, gate_up, None), all_gated[:, :rows])
        fused.add_linear(some, x[:, :rows].contiguous(), down, None)
        assert torch.equal(some, all_added[:, :rows])


@pytest.mark.parametrize("shape", [(896, 4864, 14, 2, 64), (1024, 3072, 16, 8, 128), (960, 2560, 15, 5, 64)], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 17, 40, 65, 136])
def test_every_shape_of_a_small_model_has_a_tiling(shape: tuple[int, int, int, int, int], rows: int) -> None:
    hidden, middle, heads, kv_heads, head_dim = shape
    qkv = (heads + 2 * kv_heads) * head_dim
    found = [tiling("attend_input", rows, qkv, hidden, Chip(), head_dim)]
    found += [tiling("add_linear", rows, hidden, size, Chip()) for size in (heads * head_dim, middle)]
    found += [tiling("feed_forward_input", rows, 2 * middle, hidden, Chip())]
    if head_dim == 64:  # more weights of a head than a block can hold go another way
        found += [tiling("attend_input", rows, qkv, hidden, Chip(), head_dim, True)]
    assert None not in found


def test_measured_tilings_are_possible() -> None:
    for (kind, columns, size), found in _MEASURED.items():
        for rows, (tiles, row_tiles) in zip(_ROW_BUCKETS, found, strict=True):
            possible = tilings(kind, rows, columns, size, Chip(), HEAD_DIM if kind == "attend_input" else 0)
            assert Tiling(tiles, row_tiles, warps_for(size)) in possible


def test_a_chip_with_little_shared_memory_gets_smaller_tilings() -> None:
    for rows in _ROW_BUCKETS:
        found = tiling("add_linear", rows, HIDDEN, MIDDLE, Chip(shared_bytes=99 * 1024))
        assert found is not None and found.shared_bytes(MIDDLE) <= 99 * 1024
