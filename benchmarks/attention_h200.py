"""Every way to cut the attention of a round, on one GPU: tile, split over the keys, steps in flight.

    PYTHONPATH=src python benchmarks/attention_h200.py [--only large:64x2048,small:1x300] [--seconds 60] [--out DIR]

Times are microseconds a launch inside a CUDA graph over rotating caches. Each cut's output is held against the slow
twin in float64 and against the cut that is taken today, and must be the same twice. Kernels are compiled on all cores
first.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from compile_ahead import compile_ahead
from kernels_h200 import DEVICE, LARGE, SMALL, graph_us, tree

from ddtree.kernels import cuda_module
from ddtree.kernels.tree_attention import TreeAttention as Twin
from ddtree.kernels.tree_attention_cuda import SOURCE, Limits, Tiling, TreeAttention, choose_tiling

LIMITS = Limits(8, 227 * 1024, True)


@dataclass(frozen=True)
class Case:
    """A round of one sequence: whose heads (large: Qwen3-8B's, small: SmolLM2-135M's), rows, committed tokens."""

    model: str
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.model}:{self.rows}x{self.tokens}"

    @property
    def heads(self) -> tuple[int, int, int]:
        """Heads, key heads and head size."""
        shape = LARGE if self.model == "large" else SMALL
        return shape[0], shape[1], shape[2]

    @property
    def groups(self) -> int:
        return self.heads[0] // self.heads[1]

    @property
    def packed_rows(self) -> int:
        return self.rows * self.groups

    def macros(self, cut: Tiling) -> dict[str, int]:
        return cut.macros(self.packed_rows, self.heads[2], self.groups)


CASES = (
    *(Case("large", *shape) for shape in ((64, 2048), (128, 2048), (16, 2048), (64, 128), (64, 8192), (129, 2048))),
    *(Case("small", rows, tokens) for tokens in (300, 2048) for rows in (1, 64, 16, 32)),
)
"""What matters most first."""


def wide_cuts(case: Case) -> Iterator[Tiling]:
    """By warpgroups."""
    for warps_m, warps_k in ((4, 1), (4, 2), (8, 1)):
        tiles = -(-case.packed_rows // (16 * warps_m))
        for cluster in (1, 2, 4, 8):
            blocks = tiles * case.heads[1] * cluster
            if 24 <= blocks <= 264 and cluster * warps_k * 32 < case.tokens + case.rows:
                for stages in (2, 3, 4):
                    yield Tiling(cluster, warps_k, warps_m, 1, 64, stages, wide=True)


def narrow_cuts(case: Case) -> Iterator[Tiling]:
    """By single warps."""
    for warps_m in (1, 2, 4):
        if warps_m > 1 and 16 * (warps_m - 1) >= case.packed_rows:
            continue
        for warps_k in (1, 2, 4, 8):
            for cluster in (4, 8):
                for keys in (16, 32):
                    if warps_m * warps_k >= 2 and cluster * warps_k * keys < 2 * (case.tokens + case.rows):
                        yield Tiling(cluster, warps_k, warps_m, 1, keys, 2)


def cuts(case: Case) -> list[Tiling]:
    """Today's, then all others that fit."""
    places, head_dim = case.heads[1:]
    today = choose_tiling(case.packed_rows, places, head_dim, case.tokens + case.rows, LIMITS)
    fitting = (
        cut
        for cut in (wide_cuts(case) if case.model == "large" else narrow_cuts(case))
        if cut.threads <= 384 and cut.shared_bytes(case.packed_rows, head_dim) <= LIMITS.shared_bytes
    )
    return [today, *(cut for cut in fitting if cut != today)]


def measure(case: Case) -> Iterator[dict[str, Any]]:
    page, layers = 64, 12
    heads, kv_heads, head_dim = case.heads
    pages = -(-(case.tokens + case.rows) // page)
    block_table = torch.randperm(pages, device=DEVICE).view(1, pages) + 1
    caches = torch.randn(layers, 2, (pages + 1) * page, kv_heads, head_dim, device=DEVICE).bfloat16()
    depths = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    ancestors = torch.ones(1, 1, 1, dtype=torch.bool, device=DEVICE)
    if case.rows > 1:
        own = tree(1, case.rows - 1)
        depths, ancestors = own.depths, own.ancestors
    committed = torch.full((1,), case.tokens, device=DEVICE)
    query = torch.randn(1, case.rows, heads, head_dim, device=DEVICE).bfloat16()
    arguments = (block_table, committed, depths, ancestors, page, case.tokens, None)
    exact = Twin(*arguments, torch.float64)(query.double(), caches[0, 0].double(), caches[0, 1].double(), None)
    attention = TreeAttention(*arguments, torch.bfloat16)
    today = None
    for cut in cuts(case):
        attention.tiling = cut
        row = {"case": str(case), **asdict(cut)}
        try:
            out, again = (attention(query, caches[0, 0], caches[0, 1], None) for _ in range(2))
            today = out if today is None else today
            row["relative_error"] = float(f"{float((out - exact).norm() / exact.norm()):.2e}")
            row["from_today"] = round(float((out - today).abs().max()), 5)
            row["wrong"] = not (torch.equal(out, again) and row["relative_error"] < 4e-3)
            row["us"] = round(
                graph_us(lambda i: attention(query, caches[i % layers, 0], caches[i % layers, 1], None)), 2
            )
        except cuda_module.CudaError as error:  # a cut that the device cannot run
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases, by commas, as they are printed")
    parser.add_argument("--seconds", type=float, default=60, help="no further case is begun after that")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    given = parser.parse_args()
    names = given.only.split(",") if given.only else [str(case) for case in CASES]
    if unknown := set(names) - {str(case) for case in CASES}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(map(str, CASES))}")
    cases = [case for case in CASES if str(case) in names]
    began = time.monotonic()
    compile_ahead(SOURCE, (case.macros(cut) for case in cases for cut in cuts(case)))
    rows: list[dict[str, Any]] = []
    given.out.mkdir(parents=True, exist_ok=True)
    for case in cases:
        if time.monotonic() - began > given.seconds:
            print(f"{case}: no time left", flush=True)
            continue
        found = list(measure(case))
        rows += found
        ranked = sorted((row for row in found if "us" in row), key=lambda row: row["us"])
        bad = (row for row in found if "failed" in row or row["wrong"])
        for row in (found[0], *ranked[:6], *bad):
            told = {key: value for key, value in row.items() if key not in ("rows_16", "wide")}
            print("today" if row is found[0] else "     ", told, flush=True)
        told_device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        (given.out / "attention_tune.json").write_text(json.dumps(told_device | {"results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
