"""Every fast kernel but attention (`test_fast_attention`) against its slow twin.

On a GPU they run as they are. Without one, CUDA C++ kernels are compiled for the CPU by g++, and Triton kernels run in
Triton's interpreter on small float32 shapes; what is missing for that is named as the reason of a skip.
"""

import pytest

torch = pytest.importorskip("torch")

from ddtree.kernels import choose as choose_twin  # noqa: E402
from ddtree.kernels.activation import silu_mul  # noqa: E402
from ddtree.kernels.advance import advance, keep_taps  # noqa: E402
from ddtree.kernels.choose import SamplingTensors  # noqa: E402
from ddtree.kernels.embedding import embed_rows  # noqa: E402
from ddtree.kernels.fast_set import FAST  # noqa: E402
from ddtree.kernels.forecast import forecast  # noqa: E402
from ddtree.kernels.noise import seed_key  # noqa: E402
from ddtree.kernels.norm import add_rms_norm, rms_norm  # noqa: E402
from ddtree.kernels.paged import move_rows  # noqa: E402
from ddtree.kernels.placement import place_rows  # noqa: E402
from ddtree.kernels.rotary import rotate_and_write, write_context  # noqa: E402
from ddtree.kernels.seats import take_seats  # noqa: E402
from ddtree.kernels.top_log_probs import top_log_probs  # noqa: E402
from ddtree.kernels.tree_build import build_tree  # noqa: E402
from ddtree.kernels.tree_tensors import TreeTensors  # noqa: E402
from ddtree.kernels.tree_walk import AcceptedPaths, walk_tree  # noqa: E402
from ddtree.tree import build as oracle_build  # noqa: E402
from devices import DEVICE, DTYPES, GPU, close, needs_triton, poison_memory  # noqa: E402


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    poison_memory()


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [40, 576])
def test_norms(dtype: torch.dtype, size: int) -> None:
    x, residual = torch.randn(2, 2, 3, size, dtype=dtype, device=DEVICE)
    weight = torch.randn(size, dtype=dtype, device=DEVICE)
    close(FAST.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5))
    for got, want in zip(
        FAST.add_rms_norm(x, residual, weight, 1e-5), add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        close(got, want)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = torch.randn(2, 3, 2 * 1100, dtype=dtype, device=DEVICE) * 4
    close(FAST.silu_mul(gate_up), silu_mul(gate_up))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_and_write(dtype: torch.dtype, heads: int, normed: bool) -> None:
    batch, rows, kv_heads, head_dim, slots = 2, 3, 2, 16, 64
    wide = torch.randn(batch, rows, 2 * (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=DEVICE)
    qkv = wide.chunk(2, dim=-1)[1]
    angle = torch.randn(batch, rows, head_dim // 2, device=DEVICE)
    norms = torch.randn(2, head_dim, dtype=dtype, device=DEVICE) if normed else (None, None)
    cache = torch.randn(2, slots, kv_heads, head_dim, dtype=dtype, device=DEVICE)
    places = torch.randperm(slots, device=DEVICE)[: batch * rows].view(batch, rows)
    results = []
    for kernel, own_qkv in ((rotate_and_write, qkv.contiguous()), (FAST.rotate_and_write, qkv)):
        own = cache.clone()
        query = kernel(own_qkv, head_dim, norms[0], norms[1], 1e-5, angle.cos(), angle.sin(), own, places)
        results.append((query, own))
    close(results[1][0], results[0][0])
    close(results[1][1], results[0][1])


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_write_context(dtype: torch.dtype, normed: bool) -> None:
    batch, rows, layers, kv_heads, head_dim, slots = 2, 3, 4, 2, 16, 64
    keys_values = torch.randn(batch, rows, layers * 2 * kv_heads * head_dim, dtype=dtype, device=DEVICE)
    norms = torch.randn(layers, head_dim, dtype=dtype, device=DEVICE) if normed else None
    angle = torch.randn(batch, rows, head_dim // 2, device=DEVICE)
    cache = torch.randn(layers, 2, slots, kv_heads, head_dim, dtype=dtype, device=DEVICE)
    places = torch.randperm(slots, device=DEVICE)[: batch * rows].view(batch, rows)
    want, got = cache.clone(), cache.clone()
    write_context(keys_values, norms, 1e-5, angle.cos(), angle.sin(), want, places)
    FAST.write_context(keys_values, norms, 1e-5, angle.cos(), angle.sin(), got, places)
    close(got, want)


@needs_triton
@pytest.mark.parametrize("n", [1, 6, 31])
def test_move_rows_reads_before_it_writes(n: int) -> None:
    cache = torch.randn(2, 2, 128, 2, 16, dtype=DTYPES[-1], device=DEVICE)
    source = torch.randperm(100, device=DEVICE)[:n].sort().values + 20
    target = torch.arange(20, 20 + n, device=DEVICE)
    target[n // 2 + 1 :] = 0
    want, got = cache.clone(), cache.clone()
    move_rows(want, source, target)
    FAST.move_rows(got, source, target)
    assert torch.equal(got[:, :, 1:], want[:, :, 1:])


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("some_valid", [False, True])
def test_place_rows(by_position: bool, some_valid: bool) -> None:
    batch, rows, page, half = 3, 5, 16, 12
    base = torch.tensor([0, 27, 60], device=DEVICE)
    depths = torch.randint(0, 4, (batch, rows), device=DEVICE)
    valid = torch.tensor([0, 3, 5], device=DEVICE) if some_valid else None
    block_table = torch.randperm(batch * 8, device=DEVICE).view(batch, 8) + 1
    frequencies = torch.rand(*((batch, rows, half) if by_position else (half,)), device=DEVICE)
    want = place_rows(base, depths, valid, block_table, page, frequencies, 1.25)
    got = FAST.place_rows(base, depths, valid, block_table, page, frequencies, 1.25)
    assert torch.equal(got.slots, want.slots)
    close(got.cos, want.cos)
    close(got.sin, want.sin)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("drafts", [False, True])
def test_advance_and_keep_taps(drafts: bool) -> None:
    batch, n, rows, page, size = 3, 5, 9, 16, 1104
    accepted = torch.tensor([0, 4, 2], device=DEVICE)
    path_rows = torch.randint(0, rows, (batch, n), device=DEVICE)
    tokens = torch.randint(0, 99, (batch, n), device=DEVICE)
    path = AcceptedPaths(path_rows, accepted, tokens, torch.randint(0, 99, (batch,), device=DEVICE))
    row_slots = torch.randint(0, 500, (batch, rows), device=DEVICE)
    block_table = torch.randperm(batch * 8, device=DEVICE).view(batch, 8) + 1
    seats = torch.tensor([4, 0, 2], device=DEVICE)
    taps = torch.randn(batch, rows, size, dtype=DTYPES[-1], device=DEVICE)
    results = []
    for one, other in ((advance, keep_taps), (FAST.advance, FAST.keep_taps)):
        committed, roots = torch.arange(10, 60, 10, device=DEVICE), torch.arange(5, device=DEVICE)
        pending = torch.zeros(5, dtype=torch.int64, device=DEVICE) if drafts else None
        moves = one(path, row_slots, block_table, page, seats, committed, roots, pending)
        kept = torch.zeros(5, n, size, dtype=taps.dtype, device=DEVICE)
        other(kept, seats, taps, path_rows)
        results.append((moves.source, moves.target, moves.packed, committed, roots, kept, pending))
    for got, want in zip(*results, strict=True):
        assert (got is None and want is None) or torch.equal(got, want)


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("shape", [(1, 17), (64, 129), (3, 256)])
def test_hand_over(shape: tuple[int, int]) -> None:
    packed = torch.randint(-(2**62), 2**62, shape, device=DEVICE)
    host = torch.zeros(shape, dtype=torch.int64, pin_memory=GPU)
    FAST.hand_over(packed, host)
    if GPU:
        torch.cuda.synchronize()
    assert torch.equal(host, packed.cpu())


def drawn(kind: str, batch: int, depths: int, k: int) -> torch.Tensor:
    """Log-probabilities float32 ``[batch, depths, k]``, best first."""
    logits = torch.randn(batch, depths, 1000) * (0.01 if kind == "flat" else 3)
    if kind == "peaked":
        logits[..., 0] += 12
    log_probs = logits.log_softmax(-1).topk(k).values
    if kind == "ties":
        log_probs = log_probs.round()
    if kind == "equal":
        log_probs = torch.zeros_like(log_probs)
    if kind == "holes":
        log_probs[:, 1::2, 2:] = -torch.inf
        log_probs[0, -1] = -torch.inf
    return log_probs


BUILD_CASES = [
    # batch, depths, k, budget, kind
    (1, 15, 64, 128, "soft"),
    (3, 15, 16, 16, "soft"),
    (2, 7, 8, 40, "ties"),
    (1, 15, 64, 128, "flat"),
    (1, 15, 64, 600, "soft"),
    (1, 15, 64, 128, "equal"),
    (1, 15, 32, 300, "equal"),
    (3, 4, 3, 200, "holes"),
    (1, 1, 5, 8, "soft"),
    (2, 15, 1, 15, "soft"),
    (1, 31, 64, 64, "peaked"),
    (2, 6, 40, 100, "ties"),
]
if GPU:
    BUILD_CASES += [
        (b, 15, min(n, 64), n, kind) for b, n in ((8, 128), (2, 1024), (64, 8)) for kind in ("soft", "ties")
    ]
    BUILD_CASES += [(1, 15, 64, 1024, kind) for kind in ("flat", "equal", "peaked", "holes")]


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("case", BUILD_CASES, ids=str)
def test_build(case: tuple[int, int, int, int, str]) -> None:
    batch, depths, k, budget, kind = case
    log_probs = drawn(kind, batch, depths, k)
    token_ids = torch.stack([torch.randperm(5000)[: depths * k].view(depths, k) for _ in range(batch)])
    roots = torch.randint(0, 1000, (batch,))
    max_depths = torch.full((batch,), depths)
    max_depths[1:] = torch.randint(0, depths + 2, (batch - 1,))
    arguments = [tensor.to(DEVICE) for tensor in (log_probs, token_ids, roots)]
    want = build_tree(*arguments, budget, max_depths.to(DEVICE))
    got = FAST.build_tree(*arguments, budget, max_depths.to(DEVICE))
    for name in ("tokens", "parents", "depths", "scores", "ancestors"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    tree = oracle_build(log_probs[0].numpy(), token_ids[0].numpy(), budget)
    assert got.to_draft_tree(0).token_ids.tolist() == tree.token_ids.tolist()


def random_trees(batch: int, depths: int, k: int, budget: int) -> TreeTensors:
    token_ids = torch.stack([torch.randperm(200)[:k] for _ in range(batch * depths)]).view(batch, depths, k)
    max_depths = torch.randint(1, depths + 1, (batch,))
    arguments = (drawn("ties", batch, depths, k), token_ids, torch.randint(0, 200, (batch,)), budget, max_depths)
    return build_tree(*[x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in arguments])


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("shape", [(1, 15, 8, 40), (4, 3, 4, 200), (3, 7, 1, 7), (2, 15, 16, 256)], ids=str)
def test_walk(shape: tuple[int, int, int, int]) -> None:
    batch, depths, _, budget = shape
    tree = random_trees(*shape)
    choices = torch.randint(0, 200, tree.tokens.shape, device=DEVICE)
    for sequence in range(batch):
        for row in range(budget, 0, -1):
            if tree.alive[sequence, row] and torch.rand(()) < 0.6:
                choices[sequence, tree.parents[sequence, row]] = tree.tokens[sequence, row]
    want, got = walk_tree(tree, choices, depths), FAST.walk_tree(tree, choices, depths)
    for name in ("rows", "accepted", "tokens", "roots"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert int(want.accepted.sum()) > 0


TOP_CASES = [
    (3, 5000, 64, ""),
    (2, 300, 16, "ties"),
    (1, 3000, 8, "equal"),
    (2, 70, 64, ""),
    (2, 9000, 100, "ties"),
    (2, 6000, 10, "inf"),
]
if GPU:
    TOP_CASES += [(15, v, k, kind) for v in (49152, 151936) for k in (1, 64) for kind in ("", "ties")] + [
        (1, 262144, 128, "equal")
    ]


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharp", [False, True], ids=["plain", "sharp"])
@pytest.mark.parametrize("case", TOP_CASES, ids=str)
def test_top_log_probs(dtype: torch.dtype, sharp: bool, case: tuple[int, int, int, str]) -> None:
    depths, vocab, k, kind = case
    logits = torch.randn(2, depths, vocab) * 4
    if kind == "ties":
        logits = logits.round()
    if kind == "equal":
        logits = torch.zeros_like(logits)
    if kind == "inf":
        logits[..., 5:] = -torch.inf
    logits = logits.to(dtype).to(DEVICE)
    sharpness = torch.tensor([1.25, 0.5], device=DEVICE) if sharp else None
    want, got = top_log_probs(logits, k, sharpness), FAST.top_log_probs(logits, k, sharpness)
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert bool((got[0] <= 0).all())


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("penalised", [False, True])
def test_choose(sampled: bool, filtered: bool, penalised: bool) -> None:
    batch, budget, vocab = 3, 6, 5000 if not GPU else 49152
    tree = random_trees(batch, 4, 4, budget)
    seeds = torch.tensor([seed_key(seed) for seed in range(batch)], dtype=torch.int32)
    sampling = SamplingTensors(
        temperature=torch.tensor([0.0, 1.0, 0.7], device=DEVICE),
        top_k=torch.tensor([0, 50, 0], device=DEVICE),
        top_p=torch.tensor([1.0, 1.0, 0.9], device=DEVICE),
        min_p=torch.tensor([0.0, 0.01, 0.0], device=DEVICE),
        repetition=torch.tensor([1.0, 1.3, 1.0], device=DEVICE),
        presence=torch.tensor([0.0, 0.5, 0.1], device=DEVICE),
        frequency=torch.tensor([0.0, 0.2, 0.3], device=DEVICE),
        seed_keys=seeds.to(DEVICE),
        output_counts=torch.randint(0, 3, (batch, vocab), dtype=torch.int32, device=DEVICE) if penalised else None,
        in_prompt=torch.rand(batch, vocab, device=DEVICE) < 0.1 if penalised else None,
        any_sampled=sampled,
        any_filtered=filtered,
    )
    committed = torch.tensor([3, 100, 7], device=DEVICE)
    logits = (torch.randn(batch, budget + 1, vocab, device=DEVICE) * 2).round()
    for dtype in (torch.float32, torch.bfloat16):
        want = choose_twin.choose(logits.to(dtype).float(), sampling, tree, committed)
        assert torch.equal(FAST.choose(logits.to(dtype), sampling, tree, committed), want)
        plain = choose_twin.choose(logits.to(dtype), None, tree, committed)
        assert torch.equal(FAST.choose(logits.to(dtype), None, tree, committed), plain)


@pytest.mark.parametrize("slots", [[2], [0, 4, 1], [4, 4]])
def test_take_seats(cuda_kernels: None, slots: list[int]) -> None:
    table = torch.randint(1, 99, (5, 70), device=DEVICE)
    committed, pending = torch.tensor([9, 3, 250, 0, 77], device=DEVICE), torch.tensor([2, 3, 16, 0, 5], device=DEVICE)
    roots, prompts = torch.randint(0, 1000, (2, 5), device=DEVICE)
    sharpness = torch.tensor([1.0, 1.25, 2.0, 1.5, 0.5], device=DEVICE)
    states = [(table, committed.clone(), roots, prompts, pending.clone(), sharpness) for _ in range(2)]
    rows = torch.tensor(slots, device=DEVICE)
    want, got = (kernel(rows, *state, 200) for kernel, state in zip((take_seats, FAST.take_seats), states, strict=True))
    for name, tensor in vars(want).items():
        assert torch.equal(vars(got)[name], tensor), name
    assert [int(n) for n in want.injected] == [{0: 7, 1: 0, 2: 234, 4: 0}[slot] for slot in slots]
    assert [int(n) for n in want.room] == [{0: 189, 1: 195, 2: 0, 4: 198}[slot] for slot in slots]
    assert want.sharpness.tolist() == [{0: 1.0, 1: 1.25, 2: 2.0, 4: 0.5}[slot] for slot in slots]
    if 4 in slots:  # the spare slot is emptied
        for _, lengths, _, _, waiting, _ in states:
            assert lengths[4] == 0 and waiting[4] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [64, 20])
def test_embed_rows(cuda_kernels: None, dtype: torch.dtype, hidden: int) -> None:
    table = torch.randn(50, hidden, device=DEVICE).to(dtype)
    tokens = torch.randint(0, 50, (3, 2), device=DEVICE)
    assert torch.equal(FAST.embed_rows(table, tokens), table[tokens])
    filled = FAST.embed_rows(table, tokens, 5, 7)
    assert torch.equal(filled, embed_rows(table, tokens, 5, 7))
    assert torch.equal(filled[:, :2], table[tokens]) and torch.equal(filled[1, 4], table[7])


@pytest.mark.parametrize("budget", [3, 8, 40, 200])
def test_forecast(cuda_kernels: None, budget: int) -> None:
    log_probs = torch.randn(3, 7, 9, device=DEVICE).log_softmax(-1).sort(-1, descending=True).values
    tokens = torch.arange(9, device=DEVICE).expand(3, 7, 9)
    deepest = torch.tensor([7, 2, 0], device=DEVICE)
    tree = build_tree(log_probs, tokens, torch.zeros(3, dtype=torch.int64, device=DEVICE), budget, deepest)
    path = walk_tree(tree, torch.randint(0, 2, (3, budget + 1), device=DEVICE), 7)
    packed = torch.randint(0, 99, (3, 8), device=DEVICE)
    told = [kernel(tree, path, packed, (4, 8, 16, 32), 7) for kernel in (FAST.forecast, forecast)]
    assert all(torch.equal(one[:, :8], packed) for one in told)
    got, want = (one[:, 8:].view(3, 4, 8) for one in told)
    assert (got[..., :7] - want[..., :7]).abs().max() <= 4  # units of 2**-24: the order of the sum
    assert torch.equal(got[..., 7], want[..., 7]) and want[0, :, 7].any()
    assert want[2].sum() == 0
