"""Every way to cut the attention of a large model's round, on one GPU: tile, split over the keys, steps in flight.

    PYTHONPATH=src python benchmarks/attention_h200.py [--seconds 60] [--out DIR]

Times are microseconds a launch inside a CUDA graph over rotating caches; each cut's output is held against the cut
that is taken today. Kernels are compiled on all cores first.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from kernels_h200 import DEVICE, LARGE, graph_us, tree

from ddtree.kernels import cuda_module
from ddtree.kernels.tree_attention_cuda import SOURCE, Limits, Tiling, TreeAttention, choose_tiling

HEADS, KV_HEADS, HEAD_DIM = LARGE[:3]
PACKED = HEADS // KV_HEADS
LIMITS = Limits(8, 227 * 1024, True)
CASES = ((64, 2048), (128, 2048), (16, 2048), (64, 128), (64, 8192), (65, 2048))
"""Rows and committed tokens, what matters most first."""


def cuts(rows: int, tokens: int) -> Iterator[Tiling]:
    """Today's, then all others that fit."""
    today = choose_tiling(rows * PACKED, KV_HEADS, HEAD_DIM, tokens + rows, LIMITS)
    yield today
    for warps_m in (4, 8, 12):
        tiles = -(-rows * PACKED // (16 * warps_m))
        for warps_k in (1, 2, 3):
            for cluster in (1, 2, 4, 8, 16):
                for stages in (2, 3, 4):
                    cut = Tiling(cluster, warps_k, warps_m, 1, 64, stages, wide=True)
                    blocks = tiles * KV_HEADS * cluster
                    fits = cut.threads <= 384 and cut.shared_bytes(rows * PACKED, HEAD_DIM) <= LIMITS.shared_bytes
                    is_even = cut.warps_k * cluster * 32 < tokens + rows
                    if fits and is_even and 32 <= blocks <= 264 and cut != today:
                        yield cut


def compile_one(task: tuple[tuple[str, str], ...]) -> None:
    cuda_module.machine_code(SOURCE, task, (9, 0))


def measure(rows: int, tokens: int) -> Iterator[dict[str, Any]]:
    page, layers = 64, 12
    pages = -(-(tokens + rows) // page)
    block_table = torch.randperm(pages, device=DEVICE).view(1, pages) + 1
    caches = torch.randn(layers, 2, (pages + 1) * page, KV_HEADS, HEAD_DIM, device=DEVICE).bfloat16()
    own = tree(1, rows - 1)
    committed = torch.full((1,), tokens, device=DEVICE)
    query = torch.randn(1, rows, HEADS, HEAD_DIM, device=DEVICE).bfloat16()
    attention = TreeAttention(
        block_table, committed, own.depths, own.ancestors, page, tokens, None, torch.bfloat16
    )  # fmt: skip
    expected = None
    for cut in cuts(rows, tokens):
        attention.tiling = cut
        row = {"rows": rows, "tokens": tokens, **asdict(cut)}
        try:
            out = attention(query, caches[0, 0], caches[0, 1], None).float()
            expected = out if expected is None else expected
            row["error"] = round(float((out - expected).abs().max()), 5)
            row["us"] = round(
                graph_us(lambda i: attention(query, caches[i % layers, 0], caches[i % layers, 1], None)), 2
            )
        except cuda_module.CudaError as error:  # a cut that the device cannot run
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="no further case is begun after that")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    given = parser.parse_args()
    began = time.monotonic()
    all_macros = (
        cut.macros(rows * PACKED, HEAD_DIM, PACKED, early=False) for rows, tokens in CASES for cut in cuts(rows, tokens)
    )
    tasks = {tuple(sorted((name, str(value)) for name, value in macros.items())) for macros in all_macros}
    with multiprocessing.get_context("fork").Pool(16) as pool:
        pool.map(compile_one, sorted(tasks), chunksize=1)
    print(f"{len(tasks)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    given.out.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if time.monotonic() - began > given.seconds:
            print(f"{case}: no time left", flush=True)
            continue
        found = list(measure(*case))
        rows += found
        ranked = sorted((row for row in found if "us" in row), key=lambda row: row["us"])
        for row in (found[0], *ranked[:5], *(row for row in found if "failed" in row)):
            told = {key: value for key, value in row.items() if key not in ("rows_16", "keys", "wide")}
            print("today" if row is found[0] else "     ", told, flush=True)
        told_device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        (given.out / "attention_tune.json").write_text(json.dumps(told_device | {"results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
