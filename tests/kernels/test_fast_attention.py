"""Both fast attentions against their slow twin; `test_fast_kernels` says where they run."""

from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from ddtree.kernels import tree_attention_cuda  # noqa: E402
from ddtree.kernels.fast_set import FAST  # noqa: E402
from ddtree.kernels.tree_attention import TreeAttention  # noqa: E402
from ddtree.kernels.tree_attention_cuda import Limits, Tiling, choose_tiling  # noqa: E402
from ddtree.kernels.tree_tensors import sees  # noqa: E402
from devices import DEVICE, DTYPES, GPU, close, needs_triton, poison_memory  # noqa: E402

Case = tuple[list[int], int, int, int, int, int, int | None, int | None]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    poison_memory()


def random_parents(batch: int, rows: int) -> torch.Tensor:
    draw = torch.rand(batch, rows) * torch.arange(rows)
    return draw.long().clamp_(min=0).to(DEVICE)


def compare(attention: type, dtype: torch.dtype, case: Case, both_ways: bool) -> None:
    """Call once and again with another sliding window, since all layers share what the constructor makes."""
    lengths, rows, groups, kv_heads, head_dim, page, context_window, sliding_window = case
    batch, bound = len(lengths), max(lengths) + 13
    pages = -(-(bound + rows) // page)
    block_table = torch.randperm(batch * pages, device=DEVICE).view(batch, pages) + 1
    cache = torch.randn(2, (batch * pages + 1) * page, kv_heads, head_dim, dtype=dtype, device=DEVICE)
    ancestors = sees(random_parents(batch, rows), rows)
    depths = ancestors.sum(-1) - 1
    if both_ways:
        ancestors = torch.ones_like(ancestors)
        depths = torch.arange(rows, device=DEVICE).expand(batch, rows)
    committed = torch.tensor(lengths, device=DEVICE)
    query = torch.randn(batch, rows, groups * kv_heads, head_dim, dtype=dtype, device=DEVICE)
    arguments = (block_table, committed, depths, ancestors, page, bound, context_window)
    want = TreeAttention(*arguments, torch.float32)
    got = attention(*arguments, dtype)
    for window in (sliding_window, None, sliding_window):
        reference = want(query.float(), cache[0].float(), cache[1].float(), window)
        result = got(query, cache[0], cache[1], window)
        close(result, reference.to(dtype))
        error = (result.float() - reference).norm() / reference.norm()
        assert error < (1e-5 if dtype == torch.float32 else 4e-3), float(error)


TRITON_CASES: list[Case] = [
    # batch of committed lengths, rows, groups, kv heads, head_dim, page, context window, sliding window
    ([40], 5, 3, 2, 16, 16, None, None),
    ([200, 3, 0], 19, 3, 1, 16, 16, None, 30),
    ([170, 65], 19, 2, 2, 32, 32, 50, None),
    ([129], 1, 3, 2, 16, 64, None, None),
    ([70, 100], 9, 1, 1, 64, 64, 20, 7),
]
LARGE_CASES: list[Case] = [
    ([2047], 65, 4, 8, 128, 16, None, None),
    ([2047], 1, 4, 8, 128, 64, None, None),
    ([300], 1025, 3, 3, 64, 32, None, 128),
    ([5000], 129, 3, 3, 64, 64, 512, None),
    ([3 * i for i in range(64)], 9, 3, 3, 64, 64, None, None),
    ([9000], 16, 4, 8, 128, 64, 4096, 2048),
    ([1000], 513, 4, 8, 128, 64, None, 100),
]


@needs_triton
@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", TRITON_CASES + (LARGE_CASES if GPU else []), ids=str)
@pytest.mark.parametrize("both_ways", [False, True])
def test_triton(dtype: torch.dtype, case: Case, both_ways: bool) -> None:
    from ddtree.kernels import tree_attention_triton

    compare(tree_attention_triton.TreeAttention, dtype, case, both_ways)


@pytest.fixture
def cuda_attention(cuda_kernels: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Where there is no GPU, the copy engine is emulated as well."""
    if not GPU:
        monkeypatch.setattr("ddtree.kernels.cuda_module._driver", request.getfixturevalue("emulator").CpuDriver)


CUDA_CASES: list[tuple[Case, Tiling | None]] = [
    (([40], 5, 3, 2, 64, 16, None, None), None),
    (([129], 1, 3, 2, 64, 64, None, None), None),
    (([33], 40, 3, 1, 64, 32, None, 12), None),
    (([70, 100, 0], 9, 1, 1, 64, 64, 20, 7), Tiling(2, 2, 1, 1, 32, 2)),
    (([200, 3], 19, 3, 1, 128, 16, None, 30), Tiling(4, 1, 2, 2, 16, 3)),
    (([170], 19, 4, 1, 128, 32, 50, None), Tiling(1, 1, 5, 1, 64, 2)),
    (([150], 2, 8, 1, 128, 32, None, None), Tiling(16, 4, 1, 1, 16, 3)),
    (([0], 17, 4, 1, 128, 16, None, 3), Tiling(1, 2, 4, 1, 32, 2)),
    (([150], 17, 4, 1, 128, 16, None, None), Tiling(2, 2, 4, 1, 64, 2, wide=True)),
    (([400], 65, 3, 1, 128, 64, 300, None), Tiling(1, 1, 8, 1, 64, 3, wide=True)),
    # Copies that come round to the first stage again, from pages smaller and larger than a step.
    (([700], 5, 4, 2, 128, 32, None, None), Tiling(1, 1, 4, 1, 64, 2, wide=True)),
    (([900, 20], 20, 4, 1, 128, 128, None, None), Tiling(1, 2, 4, 1, 64, 3, wide=True)),
    # Groups and whole blocks without a step; a tile that rows fill by half, and a second one.
    (([70], 20, 4, 1, 128, 64, None, None), Tiling(4, 2, 4, 1, 64, 2, wide=True)),
    (([500], 40, 4, 1, 128, 64, None, None), Tiling(4, 1, 8, 1, 64, 2, wide=True)),
    # A window that begins in the middle of a step, and one that ends before some groups' keys.
    (([333, 40], 17, 4, 1, 128, 16, 100, 90), Tiling(2, 2, 4, 1, 64, 2, wide=True)),
    (([260], 19, 4, 2, 128, 32, None, 6), Tiling(2, 1, 4, 1, 64, 4, wide=True)),
    (([90, 0], 3, 3, 1, 64, 16, None, None), Tiling(8, 4, 1, 1, 16, 2)),
]
if GPU:
    CUDA_CASES += [(case, None) for case in LARGE_CASES]


@pytest.mark.usefixtures("cuda_attention")
@pytest.mark.parametrize(("case", "tiling"), CUDA_CASES, ids=str)
@pytest.mark.parametrize("both_ways", [False, True])
def test_cuda(monkeypatch: pytest.MonkeyPatch, case: Case, tiling: Tiling | None, both_ways: bool) -> None:
    monkeypatch.setattr(tree_attention_cuda.TreeAttention, "tiling", tiling)
    compare(tree_attention_cuda.TreeAttention, torch.bfloat16, case, both_ways)


@pytest.mark.usefixtures("cuda_attention")
@pytest.mark.parametrize("tiling", [Tiling(1, 1, 4, 1, 64, 2, wide=True), Tiling(2, 2, 1, 1, 32, 2)], ids=str)
def test_what_lies_behind_the_last_key_is_never_used(monkeypatch: pytest.MonkeyPatch, tiling: Tiling) -> None:
    """Nor do scores that grow by far more than the softmax's base may lag behind."""
    monkeypatch.setattr(tree_attention_cuda.TreeAttention, "tiling", tiling)
    rows, page, lengths = 3, 128, 300
    keys, values = torch.randn(2, 4 * page, 1, 128, device=DEVICE).bfloat16()
    keys[: lengths + rows] *= torch.linspace(0, 12, lengths + rows, device=DEVICE).bfloat16()[:, None, None]
    keys[lengths + rows :], values[lengths + rows :] = torch.nan, torch.nan
    query = torch.randn(1, rows, 4, 128, device=DEVICE).bfloat16()
    block_table, committed = torch.arange(4, device=DEVICE)[None], torch.tensor([lengths], device=DEVICE)
    depths = torch.arange(rows, device=DEVICE)[None]
    arguments = (block_table, committed, depths, torch.ones(1, rows, rows, dtype=torch.bool, device=DEVICE).tril())
    got = tree_attention_cuda.TreeAttention(*arguments, page, lengths, None, torch.bfloat16)(query, keys, values, None)
    real = slice(0, lengths + rows)
    scores = torch.einsum("rhd,kd->hrk", query[0].double(), keys[real, 0].double()) * 128**-0.5
    scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu(lengths + 1), -torch.inf)
    want = torch.einsum("hrk,kd->rhd", scores.softmax(-1), values[real, 0].double()).reshape(1, rows, 512)
    close(got, want.bfloat16())


def test_what_the_kernel_does_not_serve_goes_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    asked = []

    class Other:
        def __init__(self, *arguments: object) -> None:
            asked.append(arguments)

        def __call__(self, query: torch.Tensor, *_: object) -> torch.Tensor:
            return query.flatten(2)

    module = ModuleType("tree_attention_triton")
    module.TreeAttention = Other  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ddtree.kernels.tree_attention_triton", module)
    one = torch.zeros(1, 1, dtype=torch.int64)
    for dtype, page, head_dim in ((torch.float32, 16, 64), (torch.bfloat16, 8, 64)):
        arguments = (one, one[0], one, one[None].bool(), page, 5, None, dtype)
        query = torch.zeros(1, 1, 2, head_dim, dtype=dtype)
        FAST.tree_attention(*arguments)(query, query[0], query[0], None)
        assert asked.pop() == arguments


H200, RTX = Limits(8, 227 * 1024, True), Limits(8, 99 * 1024, False)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("places", [1, 3, 8, 64, 512])
@pytest.mark.parametrize("limits", [H200, RTX], ids=["H200", "RTX"])
def test_every_tiling_fits_the_device(head_dim: int, places: int, limits: Limits) -> None:
    for packed_rows in (*range(1, 300, 7), 516, 1000, 5000):
        for keys_bound in (20, 300, 4000, 100_000):
            tiling = choose_tiling(packed_rows, places, head_dim, keys_bound, limits)
            assert tiling.shared_bytes(packed_rows, head_dim) <= limits.shared_bytes
            assert tiling.cluster <= limits.cluster and tiling.keys % 16 == 0 and tiling.stages >= 2
            assert tiling.threads <= 384 and tiling.warps_k < 15
            serves_wgmma = head_dim == 128 and tiling.keys == 64 and tiling.warps_m % 4 == 0
            assert not tiling.wide or (limits.wgmma and serves_wgmma)


def test_tilings_that_were_measured() -> None:
    for packed_rows, places, head_dim, keys_bound, want in (
        (3, 3, 64, 301, Tiling(8, 4, 1, 1, 16, 2)),
        (3, 48, 64, 501, Tiling(4, 4, 1, 1, 16, 2)),
        (27, 48, 64, 509, Tiling(4, 2, 2, 1, 32, 2)),
        (48, 3, 64, 316, Tiling(8, 4, 1, 1, 16, 2)),
        (51, 3, 64, 317, Tiling(4, 8, 1, 1, 16, 2)),
        (96, 3, 64, 332, Tiling(4, 8, 1, 1, 16, 2)),
        (192, 3, 64, 364, Tiling(4, 4, 2, 1, 32, 2)),
        (195, 3, 64, 365, Tiling(4, 4, 2, 1, 32, 2)),
        (387, 3, 64, 1129, Tiling(4, 1, 4, 1, 64, 3)),
        (4, 8, 128, 2049, Tiling(8, 8, 1, 1, 16, 3)),
        (68, 8, 128, 2065, Tiling(8, 1, 4, 1, 64, 3, wide=True)),
        (192, 8, 128, 2096, Tiling(2, 2, 4, 1, 64, 3, wide=True)),
        (196, 8, 128, 2097, Tiling(4, 1, 8, 1, 64, 4, wide=True)),
        (256, 8, 128, 2112, Tiling(4, 1, 8, 1, 64, 4, wide=True)),
        (256, 8, 128, 192, Tiling(2, 2, 4, 1, 64, 3, wide=True)),
        (256, 16, 128, 2112, Tiling(1, 2, 4, 1, 64, 3, wide=True)),
        (256, 24, 128, 2112, Tiling(1, 1, 4, 1, 64, 3, wide=True)),
        (260, 8, 128, 2113, Tiling(2, 2, 4, 1, 64, 3, wide=True)),
        (324, 8, 128, 2129, Tiling(2, 2, 4, 1, 64, 3, wide=True)),
        (384, 8, 128, 2144, Tiling(2, 2, 4, 1, 64, 3, wide=True)),
        (512, 8, 128, 2176, Tiling(2, 2, 4, 1, 64, 3, wide=True)),
        (516, 8, 128, 2177, Tiling(2, 1, 8, 1, 64, 3, wide=True)),
        (2052, 8, 128, 2561, Tiling(1, 1, 4, 1, 64, 3, wide=True)),
    ):
        assert choose_tiling(packed_rows, places, head_dim, keys_bound, H200) == want


def test_a_window_is_counted_from_the_committed_length_not_from_the_bound() -> None:
    cache = torch.randn(2, 128, 1, 16)
    one = torch.zeros(1, 1, dtype=torch.int64)
    sees_itself = torch.ones(1, 1, 1, dtype=torch.bool)
    block_table = torch.arange(1, 8)[None]
    query = torch.randn(1, 1, 2, 16)
    results = []
    for bound in (40, 70):
        arguments = (block_table, torch.tensor([40]), one, sees_itself, 16, bound, 8, torch.float32)
        results.append(TreeAttention(*arguments)(query, cache[0], cache[1], None))
    close(results[1], results[0])
