"""Times every fast kernel on one GPU, alone in a CUDA graph, and prints a table.

    PYTHONPATH=src python benchmarks/kernels_h200.py [NAME ...]

Each number is the median over replays of a graph that holds many launches over rotating inputs, per launch, so that the
gap between kernels is part of it. Names choose groups (build, top, choose, walk, norms, rotary, attention, move).
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ddtree.kernels.choose import SamplingTensors
from ddtree.kernels.fast_set import FAST
from ddtree.kernels.tree_build import build_tree as build_twin
from ddtree.kernels.tree_tensors import TreeTensors

DEVICE = torch.device("cuda")
SMALL = (9, 3, 64, 576, 1536, 49152, 30)  # heads, kv heads, head_dim, hidden, intermediate, vocab, layers: SmolLM2-135M
LARGE = (32, 8, 128, 4096, 12288, 151936, 36)  # Qwen3-8B
Row = tuple[str, Callable[[int], object], float]
"""Name, a launch on the i-th input set, and bytes that must move (0 where that says nothing)."""


def graph_us(launch: Callable[[int], object], launches: int = 24, replays: int = 15) -> float:
    """Median microseconds of one launch inside a graph of many."""
    for i in range(3):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        for i in range(launches):
            kept.append(launch(i))
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / launches)
    return statistics.median(times[2:])


def rotating(make: Callable[[], object], sets: int = 4) -> list:  # type: ignore[type-arg]
    return [make() for _ in range(sets)]


def draw_log_probs(batch: int, depths: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(batch, depths, 4096, device=DEVICE) * 2
    logits[..., 0] += 8.5  # a drafter that is right two times in three at depth 1, less below
    logits[..., 0] -= torch.linspace(0, 2, depths, device=DEVICE)
    values, ids = logits.log_softmax(-1).topk(k)
    return values, ids


def build_rows() -> Iterator[Row]:
    for batch, budget in ((1, 8), (1, 16), (1, 64), (1, 128), (1, 256), (1, 512), (1, 1024), (8, 64), (64, 16)):
        k = min(budget, 64)
        inputs = rotating(lambda batch=batch, k=k: draw_log_probs(batch, 15, k))
        roots, max_depths = (
            torch.zeros(batch, dtype=torch.int64, device=DEVICE),
            torch.full((batch,), 15, device=DEVICE),
        )
        yield (
            f"build_tree batch {batch} budget {budget}",
            lambda i, inputs=inputs, b=budget, r=roots, m=max_depths: FAST.build_tree(*inputs[i % 4], r, b, m),
            0,
        )


def top_rows() -> Iterator[Row]:
    for vocab in (SMALL[5], LARGE[5]):
        for dtype in (torch.float32, torch.bfloat16):
            inputs = rotating(lambda v=vocab, d=dtype: (torch.randn(1, 15, v, device=DEVICE) * 3).to(d))
            yield (
                f"top_log_probs 15 x {vocab} k 64 {str(dtype)[6:]}",
                lambda i, inputs=inputs: FAST.top_log_probs(inputs[i % 4], 64),
                inputs[0].nbytes,
            )


def sampling(batch: int, temperature: float) -> SamplingTensors:
    ones, zeros = torch.ones(batch, device=DEVICE), torch.zeros(batch, device=DEVICE)
    keys = torch.arange(batch, dtype=torch.int32, device=DEVICE)
    no_top_k = zeros.long()
    return SamplingTensors(
        ones * temperature, no_top_k, ones, zeros, ones, zeros, zeros, keys, None, None, temperature > 0, False
    )


def tree(batch: int, budget: int) -> TreeTensors:
    log_probs, ids = draw_log_probs(batch, 15, min(budget, 64))
    roots = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    return build_twin(log_probs, ids, roots, budget, torch.full((batch,), 15, device=DEVICE))


def choose_rows() -> Iterator[Row]:
    committed = torch.full((1,), 300, device=DEVICE)
    for vocab in (SMALL[5], LARGE[5]):
        for rows, dtype, temperature in (
            (1, torch.float32, 0.0),
            (65, torch.float32, 0.0),
            (65, torch.bfloat16, 0.0),
            (65, torch.float32, 1.0),
        ):
            inputs = rotating(lambda r=rows, v=vocab, d=dtype: torch.randn(1, r, v, device=DEVICE).to(d), 3)
            own_tree, own = tree(1, max(rows - 1, 1)), sampling(1, temperature)
            yield (
                f"choose {rows} x {vocab} {str(dtype)[6:]} T={temperature:g}",
                lambda i, inputs=inputs, t=own_tree, s=own: FAST.choose(inputs[i % 3], s, t, committed),
                inputs[0].nbytes,
            )


def walk_rows() -> Iterator[Row]:
    for budget in (16, 128, 1024):
        own = tree(1, budget)
        choices = own.tokens.roll(-1, 1).contiguous()
        yield f"walk_tree rows {budget + 1}", lambda i, t=own, c=choices: FAST.walk_tree(t, c, 15), 0


def norm_rows() -> Iterator[Row]:
    for shape in (SMALL, LARGE):
        for rows in (1, 65):
            hidden, middle = shape[3], shape[4]
            x, residual = torch.randn(2, 1, rows, hidden, device=DEVICE, dtype=torch.bfloat16)
            weight = torch.randn(hidden, device=DEVICE, dtype=torch.bfloat16)
            gate_up = torch.randn(1, rows, 2 * middle, device=DEVICE, dtype=torch.bfloat16)
            yield (
                f"add_rms_norm {rows} x {hidden}",
                lambda i, x=x, r=residual, w=weight: FAST.add_rms_norm(x, r, w, 1e-5),
                4 * x.nbytes,
            )
            yield f"silu_mul {rows} x {middle}", lambda i, g=gate_up: FAST.silu_mul(g), gate_up.nbytes * 1.5


def rotary_rows() -> Iterator[Row]:
    for shape, normed in ((SMALL, False), (LARGE, True)):
        heads, kv_heads, head_dim = shape[:3]
        for rows in (1, 65):
            qkv = torch.randn(1, rows, (heads + 2 * kv_heads) * head_dim, device=DEVICE, dtype=torch.bfloat16)
            angle = torch.randn(1, rows, head_dim // 2, device=DEVICE)
            weight = torch.randn(head_dim, device=DEVICE, dtype=torch.bfloat16) if normed else None
            cache = torch.zeros(2, 4096, kv_heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
            slots = torch.arange(rows, device=DEVICE)[None] + 64
            arguments = (qkv, head_dim, weight, weight, 1e-5, angle.cos(), angle.sin(), cache, slots)
            yield (
                f"rotate_and_write {rows} rows, {heads}+{kv_heads} heads",
                lambda i, a=arguments: FAST.rotate_and_write(*a),
                qkv.nbytes * 2,
            )


def attention_rows() -> Iterator[Row]:
    cases = [(SMALL, rows, 1, length, length) for rows in (1, 17, 65, 129) for length in (300, 1000)]
    cases += [
        (SMALL, 65, 1, 300, 8192),
        (SMALL, 1025, 1, 1000, 1000),
        (SMALL, 1, 16, 500, 500),
        (SMALL, 9, 16, 500, 500),
    ]
    cases += [(LARGE, rows, 1, 2048, 2048) for rows in (1, 17, 65, 129)]
    for shape, rows, batch, length, bound in cases:
        heads, kv_heads, head_dim = shape[:3]
        page, layers = 64, 8
        pages = -(-(bound + rows) // page)
        block_table = torch.randperm(batch * pages, device=DEVICE).view(batch, pages) + 1
        caches = torch.randn(layers, 2, (batch * pages + 1) * page, kv_heads, head_dim, device=DEVICE).bfloat16()
        own = tree(batch, rows - 1) if rows > 1 else None
        one = torch.zeros(batch, 1, dtype=torch.int64, device=DEVICE)
        depths, ancestors = (
            (own.depths, own.ancestors) if own else (one, torch.ones_like(one, dtype=torch.bool)[:, None])
        )
        committed = torch.full((batch,), length, device=DEVICE)
        attention = FAST.tree_attention(block_table, committed, depths, ancestors, page, bound, None, torch.bfloat16)
        query = torch.randn(batch, rows, heads, head_dim, device=DEVICE).bfloat16()
        yield (
            f"attention {heads}/{kv_heads}x{head_dim} rows {rows} batch {batch} ctx {length} bound {bound}",
            lambda i, a=attention, q=query, c=caches: a(q, c[i % 8, 0], c[i % 8, 1], None),
            batch * (length + rows) * kv_heads * head_dim * 4 + query.nbytes * 2,
        )


def move_rows() -> Iterator[Row]:
    for shape in (SMALL, LARGE):
        cache = torch.randn(shape[6], 2, 1024, shape[1], shape[2], device=DEVICE).bfloat16()
        source, target = torch.arange(16, device=DEVICE) * 3 + 100, torch.arange(16, device=DEVICE) + 100
        yield (
            f"move_rows 16 tokens, {shape[6]} layers",
            lambda i, c=cache, s=source, t=target: FAST.move_rows(c, s, t),
            shape[6] * 4 * 16 * shape[1] * shape[2] * 2,
        )


GROUPS = {
    "build": build_rows,
    "top": top_rows,
    "choose": choose_rows,
    "walk": walk_rows,
    "norms": norm_rows,
    "rotary": rotary_rows,
    "attention": attention_rows,
    "move": move_rows,
}


def main() -> None:
    chosen = sys.argv[1:] or list(GROUPS)
    results = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for group in chosen:
        for name, launch, moved in GROUPS[group]():
            us = graph_us(launch)
            rate = f"{moved / us / 1e3:8.0f} GB/s" if moved else ""
            print(f"{name:58s} {us:9.2f} us {rate}", flush=True)
            results.append({"kernel": name, "us": us, "bytes": moved})
    out = Path(os.environ.get("OUT", "."))
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
    (out / "kernels.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
