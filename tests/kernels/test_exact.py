"""Kernels of exact mode: close to what they stand for, and a row's result the same bits whatever runs beside it.

The slow twins run everywhere. The fast kernels run on a GPU, or as `test_fast_kernels` says.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ddtree.kernels import exact_rows  # noqa: E402
from ddtree.kernels.choose import SamplingTensors, choose  # noqa: E402
from ddtree.kernels.exact_attention import ancestors_by_depth  # noqa: E402
from ddtree.kernels.exact_set import EXACT, EXACT_TWINS  # noqa: E402
from ddtree.kernels.kernel_set import TWINS, KernelSet  # noqa: E402
from ddtree.kernels.noise import seed_key  # noqa: E402
from ddtree.kernels.tree_tensors import TreeTensors, root_only, sees  # noqa: E402
from devices import DEVICE, DTYPES, GPU, close, needs_triton, poison_memory  # noqa: E402

TYPES = [torch.float32, torch.bfloat16]
SETS = [pytest.param(EXACT_TWINS, dtype, id=f"twins-{dtype}") for dtype in TYPES]
SETS += [pytest.param(EXACT, dtype, id=f"fast-{dtype}", marks=needs_triton) for dtype in DTYPES]
ROWS = (1, 2, 16, 17, 65, 130) if GPU else (1, 2, 17)
MANY = 520 if GPU else 37


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    poison_memory()


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


PRODUCTS = [(40, 96), (100, 48), (256, 33)] + ([(576, 960), (4096, 4096), (1536, 576), (576, 49152)] if GPU else [])


@pytest.mark.parametrize(("kernels", "dtype"), SETS)
@pytest.mark.parametrize(("size", "columns"), PRODUCTS)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_of_its_row_alone(
    kernels: KernelSet, dtype: torch.dtype, size: int, columns: int, biased: bool
) -> None:
    x, weight = draw(MANY, size, dtype=dtype), draw(columns, size, dtype=dtype, scale=size**-0.5)
    bias = draw(columns, dtype=dtype) if biased else None
    together = kernels.linear(x, weight, bias)
    close(together, TWINS.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype))
    for rows in ROWS:
        for first in (0, MANY - rows):
            some = kernels.linear(x[first : first + rows], weight, bias)
            assert torch.equal(some, together[first : first + rows]), (rows, first)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [False, True])
def test_stretches_side_by_side_or_in_turn(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, adds: bool) -> None:
    from ddtree.kernels import exact_products_triton as products

    size, columns = 300, 40
    tile = products.tile_for(dtype, columns)
    assert products.splits_for(tile, columns, size)[0] > 1
    x, weight, bias = draw(5, size, dtype=dtype), draw(columns, size, dtype=dtype), draw(columns, dtype=dtype)
    results = []
    for rows in (256, 0):
        monkeypatch.setattr(products, "MAX_PARALLEL_ROWS", rows)
        stream = torch.ones(5, columns, dtype=dtype, device=DEVICE) if adds else None
        results.append(products.linear(x, weight, bias, stream))
    assert torch.equal(*results)


@needs_triton
def test_stretches_depend_on_the_weights_alone_and_none_is_empty() -> None:
    from ddtree.kernels.exact_products_triton import splits_for, tile_for

    for dtype in TYPES:
        for columns in (33, 576, 960, 4096, 6144, 151936):
            for size in (32, 64, 100, 576, 1536, 4096, 12288):
                splits, split_size = splits_for(tile_for(dtype, columns), columns, size)
                assert (splits - 1) * split_size < size <= splits * split_size


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize(("kernels", "dtype"), SETS)
@pytest.mark.parametrize("normed", [False, True])
def test_a_layer_is_of_its_row_alone(kernels: KernelSet, dtype: torch.dtype, normed: bool) -> None:
    """All that stands around the products as well: norms, rotation, gate, residual stream, angles."""
    batch, rows, hidden, middle, heads, kv_heads, head_dim, page = 2, 11, 40, 36, 3, 2, 16, 16
    block_table = torch.arange(1, 1 + batch * 8, device=DEVICE).view(batch, 8)
    base = torch.tensor([3, 70], device=DEVICE)
    depths = torch.randint(0, 9, (batch, rows), device=DEVICE)
    frequencies = torch.rand(head_dim // 2, device=DEVICE)
    stream, norm = draw(batch, rows, hidden, dtype=dtype), draw(hidden, dtype=dtype)
    qkv = draw((heads + 2 * kv_heads) * head_dim, hidden, dtype=dtype, scale=0.2)
    gate_up, down = draw(2 * middle, hidden, dtype=dtype, scale=0.2), draw(hidden, middle, dtype=dtype, scale=0.2)
    q_norm, k_norm = draw(2, head_dim, dtype=dtype) if normed else (None, None)

    def layer(set_: KernelSet, sequences: slice, some: slice) -> list[torch.Tensor]:
        at = depths[sequences, some]
        first = 0 if some.start is None else some.start
        place = set_.place_rows(
            base[sequences] + first, at - first, None, block_table[sequences], page, frequencies, 1.0
        )
        own = stream[sequences, some].clone()
        cache = torch.zeros(2, 400, kv_heads, head_dim, dtype=dtype, device=DEVICE)
        query = set_.attend_input(
            own, norm, 1e-5, qkv, None, head_dim, q_norm, k_norm, place.cos, place.sin, cache, place.slots
        )
        gated = set_.feed_forward_input(own, norm, 1e-5, gate_up, None)
        tap = torch.empty_like(own)
        set_.add_linear(own, gated, down, None, tap)
        assert torch.equal(tap, own)
        return [query, *cache[:, place.slots], own, set_.rms_norm(own, norm, 1e-5), place.cos, place.sin]

    everything = slice(None)
    together = layer(kernels, everything, everything)
    for got, want in zip(together, layer(TWINS, everything, everything), strict=True):
        if dtype == torch.float32:
            close(got, want)
        else:
            assert (got.float() - want.float()).norm() < 2e-2 * want.float().norm()
    for sequence in range(batch):
        for row in range(rows):
            alone = layer(kernels, slice(sequence, sequence + 1), slice(row, row + 1))
            for got, want in zip(alone, together, strict=True):
                assert torch.equal(got[0, 0], want[sequence, row])


@dataclass(frozen=True)
class Case:
    """Sequences of so many committed tokens with a tree below each."""

    lengths: tuple[int, ...]
    rows: int
    groups: int = 3
    kv_heads: int = 1
    head_dim: int = 16
    page: int = 16
    window: int | None = None
    is_chain: bool = False


CASES = [
    Case((40,), 5),
    Case((63, 64, 65), 7, groups=2, kv_heads=2),
    Case((0, 61, 255), 9, head_dim=24),
    Case((254, 10), 9, window=40),
    Case((250, 3), 6, groups=1, page=32, window=300),
    Case((511, 512), 4, groups=7),
    Case((31, 250), 20, is_chain=True),
]
if GPU:
    CASES += [
        Case((300,), 65, 3, 3, 64),
        Case((2047, 255, 256, 511, 512, 513, 0, 63), 9, 3, 3, 64),
        Case((2040,), 129, 4, 8, 128),
        Case((700, 5000), 129, 4, 8, 128, window=1024),
        Case((1000,), 513, 4, 8, 128, is_chain=True),
    ]


@dataclass
class Scene:
    """A paged cache with keys of committed tokens, keys of the rows behind them, and queries."""

    case: Case
    dtype: torch.dtype

    def __post_init__(self) -> None:
        case = self.case
        batch, self.bound = len(case.lengths), max(case.lengths)
        pages = -(-(self.bound + 13 + case.rows) // case.page)
        self.block_table = (torch.randperm(batch * pages) + 1).view(batch, pages).to(DEVICE)
        self.cache = draw(2, (batch * pages + 1) * case.page, case.kv_heads, case.head_dim, dtype=self.dtype)
        self.committed = torch.tensor(case.lengths, device=DEVICE)
        parents = (torch.rand(batch, case.rows) * torch.arange(case.rows)).long().clamp_(min=0).to(DEVICE)
        if case.is_chain:
            parents = (torch.arange(case.rows, device=DEVICE) - 1).clamp_min(0).repeat(batch, 1)
        self.ancestors = sees(parents, case.rows)
        self.depths = self.ancestors.sum(-1) - 1
        self.query = draw(batch, case.rows, case.groups * case.kv_heads, case.head_dim, dtype=self.dtype)

    def run(self, kernels: KernelSet, bound_more: int = 0) -> torch.Tensor:
        attention = kernels.tree_attention(
            self.block_table, self.committed, self.depths, self.ancestors, self.case.page,
            self.bound + bound_more, None, self.dtype,
        )  # fmt: skip
        return attention(self.query, self.cache[0], self.cache[1], self.case.window)

    def step(self, kernels: KernelSet, sequence: int, row: int) -> torch.Tensor:
        """What plain decoding gives at a node: its ancestors committed, their keys where they then stand."""
        case, depth = self.case, int(self.depths[sequence, row])
        committed = case.lengths[sequence]
        path = self.ancestors[sequence, row].nonzero()[:, 0]  # rows come after their parents
        slots = self.slots(sequence, committed + torch.arange(depth + 1, device=DEVICE))
        cache = self.cache.clone()
        cache[:, slots] = self.cache[:, self.slots(sequence, committed + path)]
        at_root = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
        attention = kernels.tree_attention(
            self.block_table[sequence : sequence + 1], self.committed[sequence : sequence + 1] + depth, at_root,
            torch.ones(1, 1, 1, dtype=torch.bool, device=DEVICE), case.page, committed + depth, None, self.dtype,
        )  # fmt: skip
        return attention(self.query[sequence : sequence + 1, row : row + 1], cache[0], cache[1], case.window)[0, 0]

    def slots(self, sequence: int, positions: torch.Tensor) -> torch.Tensor:
        return self.block_table[sequence, positions // self.case.page] * self.case.page + positions % self.case.page


@pytest.mark.parametrize(("kernels", "dtype"), SETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_node_attends_as_plain_decoding_does(kernels: KernelSet, dtype: torch.dtype, case: Case) -> None:
    scene = Scene(case, dtype)
    together = scene.run(kernels)
    reference = replace_dtype(scene).run(TWINS).to(dtype)
    close(together, reference)
    assert torch.equal(scene.run(kernels, bound_more=13), together)
    for sequence in range(len(case.lengths)):
        for row in range(0, case.rows, 1 + case.rows // 20):
            assert torch.equal(scene.step(kernels, sequence, row), together[sequence, row]), (sequence, row)


def replace_dtype(scene: Scene) -> Scene:
    """The same scene in float32."""
    wide = Scene(scene.case, torch.float32)
    for name in ("block_table", "committed", "ancestors", "depths"):
        setattr(wide, name, getattr(scene, name))
    wide.cache, wide.query = scene.cache.float(), scene.query.float()
    return wide


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if max(case.lengths) > 240][:4], ids=str)
def test_attended_stretches_side_by_side_or_in_turn(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, case: Case
) -> None:
    from ddtree.kernels import exact_attention_triton

    scene = Scene(case, dtype)
    together = scene.run(EXACT)
    monkeypatch.setattr(exact_attention_triton, "MAX_PARTIAL_BYTES", 0)
    assert torch.equal(scene.run(EXACT), together)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_is_the_same_as_a_tree_of_one_path(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    from ddtree.kernels import exact_attention_triton

    scene = Scene(Case((45, 250), 9, is_chain=True), dtype)
    together = scene.run(EXACT)
    made = exact_attention_triton.TreeAttention.__init__

    def never_a_chain(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        assert bool(self._chains.all())
        self._chains.zero_()

    monkeypatch.setattr(exact_attention_triton.TreeAttention, "__init__", never_a_chain)
    assert torch.equal(scene.run(EXACT), together)


@pytest.mark.parametrize("kernels", [EXACT_TWINS, pytest.param(EXACT, marks=needs_triton)], ids=lambda k: k.name)
def test_a_draft_window_is_refused(kernels: KernelSet) -> None:
    scene = Scene(Case((40,), 2), torch.float32)
    with pytest.raises(ValueError, match="draft window"):
        kernels.tree_attention(
            scene.block_table, scene.committed, scene.depths, scene.ancestors, 16, 40, 8, torch.float32
        )


def test_ancestors_by_depth() -> None:
    ancestors = sees(torch.tensor([[0, 0, 0, 1, 3]]), 5)
    above = ancestors_by_depth(ancestors.sum(-1) - 1, ancestors)
    assert above[0].tolist() == [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 1, 3, 0, 0], [0, 1, 3, 4, 0]]


@needs_triton
def test_running_sums_are_of_their_row_alone() -> None:
    from ddtree.kernels.exact_sum_triton import running_sum

    x = torch.rand(3, 4, 5001, device=DEVICE).softmax(-1)
    together = running_sum(x)
    torch.testing.assert_close(together, x.double().cumsum(-1).float(), rtol=1e-5, atol=1e-6)
    for sequence in range(3):
        for row in range(4):
            assert torch.equal(running_sum(x[sequence, row]), together[sequence, row])


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("kernels", [EXACT_TWINS, pytest.param(EXACT, marks=needs_triton)], ids=lambda k: k.name)
@pytest.mark.parametrize("adjusted", [False, True])
def test_a_choice_is_of_its_row_alone(kernels: KernelSet, adjusted: bool) -> None:
    batch, rows, vocab = 3, 6, 49153 if GPU else 2051
    tree = random_trees(batch, rows)
    sampling = SamplingTensors(
        temperature=torch.tensor([0.0, 1.0, 0.7], device=DEVICE),
        top_k=torch.tensor([0, 0, 40], device=DEVICE),
        top_p=torch.tensor([1.0, 1.0, 0.9], device=DEVICE),
        min_p=torch.tensor([0.0, 0.0, 0.01], device=DEVICE),
        repetition=torch.tensor([1.0, 1.3, 1.1], device=DEVICE),
        presence=torch.tensor([0.0, 0.5, 0.1], device=DEVICE),
        frequency=torch.tensor([0.0, 0.2, 0.3], device=DEVICE),
        seed_keys=torch.tensor([seed_key(seed) for seed in range(batch)], dtype=torch.int32, device=DEVICE),
        output_counts=torch.randint(0, 3, (batch, vocab), dtype=torch.int32, device=DEVICE) if adjusted else None,
        in_prompt=torch.rand(batch, vocab, device=DEVICE) < 0.1 if adjusted else None,
        any_sampled=True,
        any_filtered=True,
        logit_bias=torch.randn(batch, vocab, device=DEVICE) if adjusted else None,
    )
    committed = torch.tensor([3, 100, 7], device=DEVICE)
    logits = torch.randn(batch, rows, vocab, device=DEVICE).mul_(2).bfloat16()
    together = kernels.choose(logits, sampling, tree, committed)
    agreed = (together == choose(logits, sampling, tree, committed)).float().mean()
    assert agreed > 0.9  # the rounding of a filter's sums may decide otherwise
    for sequence in range(batch):
        for row in range(rows):
            one = slice(sequence, sequence + 1)
            fields = {k: v[one] for k, v in vars(sampling).items() if isinstance(v, torch.Tensor)}
            if adjusted:  # the path's tokens are generated tokens by then
                counts = fields["output_counts"].clone()
                path = tree.tokens[sequence][tree.ancestors[sequence, row]][1:]
                fields["output_counts"] = counts.index_add_(1, path, torch.ones_like(path, dtype=torch.int32)[None])
            depth = tree.depths[sequence, row]
            is_filtered = sequence == 2  # alone, the others have no filter
            step = root_only(tree.tokens[one, row])
            alone = kernels.choose(
                logits[one, row : row + 1], replace(sampling, **fields, any_filtered=is_filtered), step,
                committed[one] + depth,
            )  # fmt: skip
            assert int(alone) == int(together[sequence, row]), (sequence, row)


def random_trees(batch: int, rows: int) -> TreeTensors:
    parents = (torch.rand(batch, rows) * torch.arange(rows)).long().clamp_(min=0).to(DEVICE)
    ancestors = sees(parents, rows)
    tokens = torch.randint(0, 50, (batch, rows), device=DEVICE)
    return TreeTensors(tokens, parents, ancestors.sum(-1) - 1, torch.zeros(batch, rows, device=DEVICE), ancestors)


def test_rows_of_a_product_keep_their_place() -> None:
    x, weight = torch.randn(2, 3, 8), torch.randn(5, 8)
    close(exact_rows.linear(x, weight), x @ weight.t())
