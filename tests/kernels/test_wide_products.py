"""The products of large layers against their twins: on a GPU as they are, else in Triton's interpreter."""

from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from ddtree.kernels import layer_products as twins  # noqa: E402
from ddtree.kernels import layer_products_cuda as fast  # noqa: E402
from ddtree.kernels import wide_tiling  # noqa: E402
from ddtree.kernels.fast_set import FAST, products_of  # noqa: E402
from ddtree.kernels.kernel_set import TWINS  # noqa: E402
from ddtree.kernels.layer_products_cuda import MOST_WIDE_ROWS  # noqa: E402
from ddtree.kernels.norm import rms_norm  # noqa: E402
from ddtree.kernels.product_tiling import Chip  # noqa: E402
from ddtree.kernels.wide_tiling import CUBLAS, WideTile, wide_tile  # noqa: E402
from devices import DEVICE, GPU, needs_triton  # noqa: E402

DTYPE = torch.bfloat16 if GPU else torch.float32  # the interpreter's bfloat16 products are wrong
HIDDEN, MIDDLE, HEADS, KV_HEADS, HEAD_DIM = 320, 448, 3, 1, 64  # 5 and 7 steps: the last of 3 stretches is shorter
TILES = {
    "split": WideTile(64, 64, 3, 3),
    "whole": WideTile(64, 64, 1, 3),
    "wider than its rows": WideTile(32, 64, 2, 3),
    "by rows": WideTile(16, 64, by="rows"),
    "by wgmma": WideTile(64, 64, 1, 3, by="wgmma"),
    "by wgmma, split": WideTile(64, 64, 3, 3, by="wgmma"),
    "by wgmma, joined": WideTile(64, 64, 3, 3, by="wgmma", joined=True),
    "by cuBLAS": CUBLAS,
}
CASES = [
    pytest.param(replace(tile, early=GPU), rows, id=f"{name}, {rows} rows")
    for name, tile in TILES.items()
    for rows in ((1, 20, 64, 66, 80, 90, 128) if GPU else (1, 66, 90))
    if tile.fits(rows, HIDDEN, HIDDEN, False)
]


def drawer(tile: WideTile) -> Callable[..., torch.Tensor]:
    """Of normal numbers in the type that the tile's kernels can be tested in."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if tile.by == "wgmma" else DTYPE
    return lambda *shape, scale=1.0: (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def of(rows: int) -> tuple[int, int]:
    """Batch and rows of each sequence."""
    return (2, rows // 2) if rows > 1 else (1, 1)


def close(got: torch.Tensor, want: torch.Tensor, roundings: int = 1) -> None:
    assert not got.isnan().any()
    error = (got.float() - want.float()).norm() / want.float().norm()
    # Where the interpreter makes bfloat16 of float32 it cuts instead of rounding.
    assert error < (1e-6 if got.dtype == torch.float32 else (2 + 2 * roundings) * 1e-3 if GPU else 4e-2), float(error)


def roundings(tile: WideTile) -> int:
    return 2 if tile.by == "cublas" else 1


@needs_triton
@pytest.mark.usefixtures("wide_products")
@pytest.mark.parametrize(("tile", "rows"), CASES)
@pytest.mark.parametrize("dressed", [False, True], ids=["bare", "biases and head norms"])
def test_attend_input(tile: WideTile, rows: int, dressed: bool) -> None:
    from ddtree.kernels import wide_layer_triton as wide

    draw = drawer(tile)
    columns, slots = (HEADS + 2 * KV_HEADS) * HEAD_DIM, 200
    stream, norm, weight = draw(*of(rows), HIDDEN), draw(HIDDEN), draw(columns, HIDDEN, scale=HIDDEN**-0.5)
    bias, q_norm, k_norm = (draw(columns), draw(HEAD_DIM), draw(HEAD_DIM)) if dressed else (None, None, None)
    angle = torch.randn(*of(rows), HEAD_DIM // 2, device=DEVICE)
    places = torch.randperm(slots, device=DEVICE)[:rows].view(of(rows))
    cache = draw(2, slots, KV_HEADS, HEAD_DIM)
    rest = (stream, norm, 1e-5, weight, bias, HEAD_DIM, q_norm, k_norm, angle.cos(), angle.sin())
    want_cache, got_cache = cache.clone(), cache.clone()
    want = twins.attend_input(*rest, want_cache, places)
    close(wide.attend_input(tile, *rest, got_cache, places), want, roundings(tile))
    close(got_cache[:, places.flatten()], want_cache[:, places.flatten()], roundings(tile))
    unread = (torch.full_like(stream, torch.nan), *rest[1:])
    normed = rms_norm(stream, norm, 1e-5)
    close(wide.attend_input(tile, *unread, cache.clone(), places, normed), want, roundings(tile))
    untouched = torch.ones(slots, dtype=torch.bool, device=DEVICE)
    untouched[places] = False
    assert torch.equal(got_cache[:, untouched], cache[:, untouched])


@needs_triton
@pytest.mark.usefixtures("wide_products")
@pytest.mark.parametrize(("tile", "rows"), CASES)
@pytest.mark.parametrize("biased", [False, True])
def test_feed_forward_input(tile: WideTile, rows: int, biased: bool) -> None:
    from ddtree.kernels import wide_layer_triton as wide

    draw = drawer(tile)
    weight, bias = draw(2 * MIDDLE, HIDDEN, scale=HIDDEN**-0.5), draw(2 * MIDDLE) if biased else None
    rest = (draw(*of(rows), HIDDEN), draw(HIDDEN), 1e-5, weight, bias)
    got, want = wide.feed_forward_input(tile, *rest), twins.feed_forward_input(*rest)
    assert got.shape == want.shape
    close(got, want, roundings(tile))
    assert torch.equal(wide.feed_forward_input(tile, *rest), got)  # sums have one order


@needs_triton
@pytest.mark.usefixtures("wide_products")
@pytest.mark.parametrize(("tile", "rows"), CASES)
@pytest.mark.parametrize("tapped", [False, True], ids=["bare", "bias and tap"])
def test_add_linear(tile: WideTile, rows: int, tapped: bool) -> None:
    from ddtree.kernels import wide_layer_triton as wide

    draw = drawer(tile)
    stream, x, weight = draw(*of(rows), HIDDEN), draw(*of(rows), MIDDLE), draw(HIDDEN, MIDDLE, scale=MIDDLE**-0.5)
    taps, bias = torch.zeros(*of(rows), 3, HIDDEN, dtype=stream.dtype, device=DEVICE), draw(HIDDEN) if tapped else None
    want, got = stream.clone(), stream.clone()
    twins.add_linear(want, x, weight, bias)
    assert wide.add_linear(tile, got, x, weight, bias, taps[:, :, 1] if tapped else None) is None
    close(got, want, roundings(tile))
    if tapped:
        assert torch.equal(taps[:, :, 1], got)
    assert not taps[:, :, ::2].any()


@needs_triton
@pytest.mark.usefixtures("wide_products")
@pytest.mark.parametrize(("tile", "rows"), CASES)
@pytest.mark.parametrize("tapped", [False, True], ids=["bare", "bias and tap"])
def test_add_linear_with_the_next_norm(tile: WideTile, rows: int, tapped: bool) -> None:
    """Where a kernel behind adds up stretches, it norms the new stream as well."""
    from ddtree.kernels import wide_layer_triton as wide

    draw = drawer(tile)
    stream, x, weight = draw(*of(rows), HIDDEN), draw(*of(rows), MIDDLE), draw(HIDDEN, MIDDLE, scale=MIDDLE**-0.5)
    taps, bias = torch.zeros(*of(rows), 3, HIDDEN, dtype=stream.dtype, device=DEVICE), draw(HIDDEN) if tapped else None
    norm, into = draw(HIDDEN), draw(2 * MIDDLE, HIDDEN, scale=HIDDEN**-0.5)
    want, got = stream.clone(), stream.clone()
    twins.add_linear(want, x, weight, bias)
    normed = wide.add_linear(tile, got, x, weight, bias, taps[:, :, 1] if tapped else None, norm, 1e-5)
    close(got, want, roundings(tile))
    assert not tapped or torch.equal(taps[:, :, 1], got)
    assert (normed is not None) == tile.leaves_sums
    if normed is not None:
        close(normed, rms_norm(got, norm, 1e-5))
        read = wide.feed_forward_input(tile, torch.full_like(got, torch.nan), norm, 1e-5, into, None, normed)
        close(read, twins.feed_forward_input(got, norm, 1e-5, into, None), roundings(tile))


def test_stretches_that_do_not_come_out_even_are_not_empty() -> None:
    assert WideTile(64, 64, 8).fits(16, 4096, 9 * 64, False) is False  # 9 steps: 4 stretches of 2 and one of 1
    assert WideTile(64, 64, 5).fits(16, 4096, 9 * 64, False)


@pytest.mark.parametrize(
    "tile", [WideTile(64, 64), WideTile(64, 64, by="rows"), WideTile(64, 96), WideTile(96, 64)], ids=str
)
def test_what_does_not_fit_is_refused(tile: WideTile) -> None:
    rows = 129 if tile == WideTile(64, 64) else 2 if tile.by == "rows" else 1
    assert not tile.fits(rows, 4096, 2560, False)


@pytest.mark.parametrize(
    ("tile", "rows", "fits"),
    [
        (WideTile(256, 64, by="wgmma"), 136, True),
        (WideTile(256, 64, by="wgmma"), 137, False),
        (WideTile(256, 64, stages=5, by="wgmma"), 64, True),  # 5 x 40 KB
        (WideTile(256, 64, stages=5, by="wgmma"), 128, False),  # 5 x 48 KB
        (WideTile(512, 64, by="wgmma"), 8, False),
        (WideTile(64, 96, by="wgmma"), 8, False),
        (WideTile(256, 64, splits=8, joined=True, by="wgmma"), 8, True),
        (WideTile(256, 64, splits=10, joined=True, by="wgmma"), 8, False),
        (WideTile(256, 64, joined=True, by="wgmma"), 8, False),
        (WideTile(256, 64, splits=10, by="wgmma"), 8, True),
    ],
    ids=str,
)
def test_what_wgmma_can_do(tile: WideTile, rows: int, fits: bool) -> None:
    assert tile.fits(rows, 4096, 2560, False) == fits


def test_measured_tiles_fit_the_product_and_the_chip() -> None:
    for (kind, columns, size), tiles in wide_tiling._MEASURED.items():
        for (least, most), tile in zip(wide_tiling._ROWS, tiles, strict=True):
            for rows in range(least, most + 1) if tile is not None else ():
                assert tile.fits(rows, columns, size, kind == "feed_forward_input"), rows
                held = -(-rows // 8) * 8
                if tile.by == "triton":  # one block of 16, 32 or 64 rows, or one of 64 and another of these
                    held = 64 * (rows > 64) + max(16, 1 << (rows - 1 - 64 * (rows > 64)).bit_length())
                shared = 2 * tile.stages * tile.depth * (tile.columns + held)
                assert tile.by == "rows" or shared <= Chip().shared_bytes, rows


@pytest.mark.parametrize(("kind", "columns", "size"), list(wide_tiling._MEASURED), ids=str)
def test_row_counts_between_the_tiles_go_to_cublas(kind: str, columns: int, size: int) -> None:
    streamed = {rows for rows in range(1, 200) if wide_tile(kind, rows, columns, size) is not None}
    without = {
        ("attend_input", 6144, 4096): {*range(97, 129)},
        ("add_linear", 4096, 4096): {*range(65, 81)},
        ("feed_forward_input", 24576, 4096): {*range(81, 129)},
        ("attend_input", 6144, 2560): {*range(97, 129)},
        ("feed_forward_input", 19456, 2560): {*range(81, 129)},
    }
    assert streamed == {*range(1, 129)} - without.get((kind, columns, size), set())
    assert wide_tile(kind, 16, columns, size + 64) is None


@needs_triton
def test_a_measured_tile_is_used_where_the_chip_can(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree.kernels import wide_layer_triton as wide

    tile = WideTile(64, 64, early=GPU)
    monkeypatch.setattr(wide_tiling, "_MEASURED", {("add_linear", 2048, 64): (None, None, tile)})
    used: list[WideTile] = []
    monkeypatch.setattr(wide, "add_linear", lambda tile, *rest: used.append(tile))
    stream, x, weight = (
        torch.zeros(*size, dtype=torch.bfloat16, device=DEVICE) for size in ((1, 20, 2048), (1, 20, 64), (2048, 64))
    )
    for can in (False, True):
        monkeypatch.setattr(fast, "has_wide_tiles", lambda _, can=can: can)
        fast.add_linear(stream, x, weight, None)
        fast.add_linear(stream[:, :16].contiguous(), x[:, :16], weight, None)
        assert used == [tile, CUBLAS] * can
    for rows, hidden, goes in ((MOST_WIDE_ROWS, 2048, True), (MOST_WIDE_ROWS + 1, 2048, False), (20, 1024, False)):
        stream, weight = stream.new_empty(1, rows, hidden), weight.new_empty(hidden, 64)
        assert fast._wide_tile_for("add_linear", stream, weight) == (CUBLAS if goes else None)


def test_facts_say_which_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = WideTile(64, 128, 2)
    measured = {("add_linear", 2048, 8192): (tile, None, tile, None, None, tile)}
    monkeypatch.setattr(wide_tiling, "_MEASURED", measured)
    monkeypatch.setattr(fast, "has_wide_tiles", lambda device: device.type == "cuda")
    sizes, gpu = (2048, 8192, 16, 8, 128), torch.device("cuda")
    assert products_of(TWINS, *sizes, torch.bfloat16, gpu) is None
    found = products_of(FAST, *sizes, torch.bfloat16, gpu)
    assert found is not None and found.pop("down") == "streamed at 1, 17-32, 65-80 rows, else cuBLAS"
    assert set(found.values()) == {"cuBLAS"} and len(found) == 3
    for dtype, device in ((torch.float32, gpu), (torch.bfloat16, torch.device("cpu"))):
        assert set((products_of(FAST, *sizes, dtype, device) or {}).values()) == {"cuBLAS"}
    assert set((products_of(FAST, 1024, 3072, 16, 8, 64, torch.bfloat16, gpu) or {}).values()) == {"fused"}
