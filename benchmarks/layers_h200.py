"""Times all layers of a pass on one GPU, each pass one CUDA graph, with own weights for each layer.

    PYTHONPATH=src python benchmarks/layers_h200.py passes [--large]   fused products against plain kernels
    PYTHONPATH=src python benchmarks/layers_h200.py tune               the best tiling of every product

Plain kernels are cuBLAS products with a kernel each for norms, rotation and gate, nine launches a layer.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compile_ahead import compile_ahead
from torch.nn.functional import linear

from ddtree.kernels import cuda_module
from ddtree.kernels import layer_products_cuda as fused
from ddtree.kernels.fast_set import FAST
from ddtree.kernels.placement import Placement
from ddtree.kernels.product_tiling import Chip, Tiling, tilings

BF16 = torch.bfloat16
_LAUNCH = cuda_module.CudaModule.launch


@dataclass(frozen=True)
class Shape:
    hidden: int
    middle: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    head_norms: bool = False

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def products(self) -> dict[str, tuple[str, int, int]]:
        """Kernel, columns and inner size by name."""
        return {
            "attend_input": ("attend_input", self.qkv, self.hidden),
            "add_linear output": ("add_linear", self.hidden, self.heads * self.head_dim),
            "feed_forward_input": ("feed_forward_input", 2 * self.middle, self.hidden),
            "add_linear down": ("add_linear", self.hidden, self.middle),
        }


SMALL = Shape(576, 1536, 9, 3, 64, 30)
DRAFTER = replace(SMALL, layers=5, head_norms=True)
MIDDLE = Shape(1024, 3072, 16, 8, 128, 28, True)
LARGE = Shape(4096, 12288, 32, 8, 128, 36, True)
Layer = dict[str, torch.Tensor]


def make_layers(shape: Shape) -> list[Layer]:
    def draw(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=BF16, device="cuda").normal_(0, size[-1] ** -0.5)

    return [
        {
            "qkv": draw(shape.qkv, shape.hidden),
            "output": draw(shape.hidden, shape.heads * shape.head_dim),
            "gate_up": draw(2 * shape.middle, shape.hidden),
            "down": draw(shape.hidden, shape.middle),
            "norm": torch.ones(shape.hidden, dtype=BF16, device="cuda"),
            "head_norm": torch.ones(shape.head_dim, dtype=BF16, device="cuda"),
        }
        for _ in range(shape.layers)
    ]


def graph_ms(launch: Callable[[], object], replays: int = 25) -> float:
    """Median milliseconds of one replay."""
    launch()  # compiles and loads what is new
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = launch()
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    del kept
    return statistics.median(times[5:])


class PassOfRows:
    """``rows`` rows of one sequence behind ``context`` cached tokens."""

    def __init__(self, shape: Shape, layers: list[Layer], rows: int, context: int = 256) -> None:
        self.shape, self.layers, self.rows = shape, layers, rows
        page = 64
        pages = -(-(context + rows) // page)
        table = torch.arange(1, pages + 1, device="cuda")[None]
        cache = (shape.layers, 2, (pages + 1) * page, shape.kv_heads, shape.head_dim)
        self.cache = torch.randn(*cache, device="cuda", dtype=BF16)
        angle = torch.randn(1, rows, shape.head_dim // 2, device="cuda")
        slots = torch.arange(page + context, page + context + rows, device="cuda")[None]
        self.placement = Placement(slots, angle.cos(), angle.sin())
        depths = torch.arange(rows, device="cuda")[None]
        sees = torch.ones(1, rows, rows, dtype=torch.bool, device="cuda").tril()
        committed = torch.full((1,), context, device="cuda")
        self.attention = FAST.tree_attention(table, committed, depths, sees, page, 2048, None, BF16)
        self.start = torch.randn(1, rows, shape.hidden, device="cuda", dtype=BF16)
        self.attended = torch.randn(1, rows, shape.heads * shape.head_dim, device="cuda", dtype=BF16)

    def _attend(self, i: int, query: torch.Tensor, attends: bool) -> torch.Tensor:
        return self.attention(query, self.cache[i, 0], self.cache[i, 1], None) if attends else self.attended

    def fused(self, attends: bool = True) -> torch.Tensor:
        stream, place, normed = self.start.clone(), self.placement, None
        for i, layer in enumerate(self.layers):
            norm = layer["head_norm"] if self.shape.head_norms else None
            query = FAST.attend_input(
                stream, layer["norm"], 1e-5, layer["qkv"], None, self.shape.head_dim, norm, norm,
                place.cos, place.sin, self.cache[i], place.slots, normed,
            )  # fmt: skip
            attended = self._attend(i, query, attends)
            normed = FAST.add_linear(stream, attended, layer["output"], None, None, layer["norm"], 1e-5)
            gated = FAST.feed_forward_input(stream, layer["norm"], 1e-5, layer["gate_up"], None, normed)
            normed = FAST.add_linear(stream, gated, layer["down"], None, None, layer["norm"], 1e-5)
        return FAST.rms_norm(stream, self.layers[0]["norm"], 1e-5) if normed is None else normed

    def plain(self, attends: bool = True) -> torch.Tensor:
        stream, place = self.start.clone(), self.placement
        normed = FAST.rms_norm(stream, self.layers[0]["norm"], 1e-5)
        for i, layer in enumerate(self.layers):
            norm = layer["head_norm"] if self.shape.head_norms else None
            query = FAST.rotate_and_write(
                linear(normed, layer["qkv"]), self.shape.head_dim, norm, norm, 1e-5,
                place.cos, place.sin, self.cache[i], place.slots,
            )  # fmt: skip
            delta = linear(self._attend(i, query, attends), layer["output"])
            normed, stream = FAST.add_rms_norm(delta, stream, layer["norm"], 1e-5)
            gated = FAST.silu_mul(linear(normed, layer["gate_up"]))
            normed, stream = FAST.add_rms_norm(linear(gated, layer["down"]), stream, layer["norm"], 1e-5)
        return normed


def passes(large: bool) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    shapes = {"SmolLM2-135M": (SMALL, (1, 9, 17, 33, 65, 129)), "its drafter": (DRAFTER, (16,))}
    shapes["Qwen3-0.6B"] = (MIDDLE, (1, 17, 65))
    if large:
        shapes = {"Qwen3-8B": (LARGE, (1, 17, 65))}
    for name, (shape, all_rows) in shapes.items():
        layers = make_layers(shape)
        for rows in all_rows:
            own = PassOfRows(shape, layers, rows)
            error = (own.fused().float() - own.plain().float()).norm() / own.plain().float().norm()
            row = {"shape": name, "rows": rows, "error": round(float(error), 4)}
            for way in ("plain", "fused"):
                row[f"{way}_ms"] = round(graph_ms(getattr(own, way)), 4)
                row[f"{way}_less_attention_ms"] = round(graph_ms(partial(getattr(own, way), False)), 4)
            if fused.is_small(own.start):
                _set_early(False)
                row["fused_one_after_another_ms"] = round(graph_ms(own.fused), 4)
                _set_early(True)
            print(row, flush=True)
            table.append(row)
    return table


def _set_early(may: bool) -> None:
    """Allow or forbid that kernels start while the one before still runs."""
    launch = _LAUNCH if may else lambda *arguments, early=False: _LAUNCH(*arguments)
    cuda_module.CudaModule.launch = launch  # type: ignore[method-assign, assignment]


def candidates(shape: Shape, rows: int) -> Iterator[tuple[str, Tiling]]:
    for name, (kind, columns, size) in shape.products().items():
        head_dim = shape.head_dim if kind == "attend_input" else 0
        for tiling in tilings(kind, rows, columns, size, Chip(), head_dim, bool(head_dim) and shape.head_norms):
            yield name, tiling


def compile_all(work: list[tuple[Shape, int]]) -> None:
    """Every kernel that tilings need; to be called before this process touches the GPU."""
    needed = []
    for shape, rows in work:
        for name, tiling in candidates(shape, rows):
            kind, _, size = shape.products()[name]
            needed.append(fused.defines(kind, tiling, size, shape.head_dim if kind == "attend_input" else 0))
    compile_ahead(fused.SOURCE, needed)


def tune(all_rows: tuple[int, ...]) -> list[dict[str, object]]:
    """The best tilings of whole passes, one product at a time, in turns.

    Kernels that follow one another share multiprocessors, so the best tiling of one depends on the others.
    """
    work = [(shape, rows) for shape in (SMALL, DRAFTER) for rows in (all_rows if shape is SMALL else (16,))]
    compile_all(work)
    choose, found = fused.tiling, []
    layers = {shape: make_layers(shape) for shape in (SMALL, DRAFTER)}
    for shape, rows in work:
        own = PassOfRows(shape, layers[shape], rows)
        options: dict[tuple[str, int, int], list[Tiling]] = {}
        for name, tiling in candidates(shape, rows):
            options.setdefault(shape.products()[name], []).append(tiling)
        chosen: dict[tuple[str, int, int], Tiling] = {}
        best = start = graph_ms(own.fused)

        def override(kind: str, _: int, columns: int, size: int, *rest: Any) -> Tiling:
            own_choice: Tiling = chosen.get((kind, columns, size)) or choose(kind, rows, columns, size, *rest)  # noqa: B023
            return own_choice

        fused.tiling = override  # type: ignore[assignment]
        for turn in range(3):
            before = best
            for product, own_options in options.items():
                times = []
                for tiling in own_options:
                    kept = chosen.get(product)
                    chosen[product] = tiling
                    times.append((graph_ms(own.fused, 13), own_options.index(tiling)))
                    if kept is None:
                        del chosen[product]
                    else:
                        chosen[product] = kept
                time, index = min(times)
                if time < best * 0.998:
                    chosen[product], best = own_options[index], time
                if turn == 0:  # go on with those that are near
                    near = sorted(times)[: max(6, len(times) // 3)]
                    options[product] = [own_options[i] for _, i in near]
            if best > before * 0.997:
                break
        best = graph_ms(own.fused)
        fused.tiling = choose
        text = {f"{k[0]} {k[1]}x{k[2]}": f"{t.tiles}x{t.row_tiles}" for k, t in chosen.items()}
        print(f"{shape.layers} layers, {rows} rows: {start:.4f} -> {best:.4f} ms  {text}", flush=True)
        found.append({"layers": shape.layers, "rows": rows, "start_ms": start, "best_ms": best, "tilings": text})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("passes", "tune"))
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 9, 17, 33, 65, 129])
    args = parser.parse_args()
    results = passes(args.large) if args.what == "passes" else tune(tuple(args.rows))
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
    name = f"layers_{args.what}{'_large' if args.large else ''}.json"
    (Path(os.environ.get("OUT", ".")) / name).write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
