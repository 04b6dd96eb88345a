"""Times the products of large models' layers on one GPU: our tiles against cuBLAS with its small kernels.

    PYTHONPATH=src python benchmarks/wide_h200.py check                whether every tile by wgmma multiplies right
    PYTHONPATH=src python benchmarks/wide_h200.py products --out DIR   each product alone, with every tile
    PYTHONPATH=src python benchmarks/wide_h200.py tune --out DIR       the best tile of each product in whole layers
    PYTHONPATH=src python benchmarks/wide_h200.py compile              every kernel of these; no GPU needed

A time is that of 36 products or layers with own weights in one CUDA graph, so that the L2 cache holds none of them;
norms, rotation, gate and residual stream included, in `tune` also attention over 2,048 tokens. `tune` tries in whole
layers what was fastest alone. `--by triton` has Triton's tiles tried instead of those by wgmma, `--by both` both.
"""

import argparse
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import wide_check
from layers_h200 import BF16, LARGE, PassOfRows, Shape, graph_ms, make_layers
from wide_candidates import brief, candidates

from ddtree.kernels import layer_products as twins
from ddtree.kernels import layer_products_cuda as fast
from ddtree.kernels import wide_tiling
from ddtree.kernels.wide_tiling import WideTile

QWEN3_4B = Shape(2560, 9728, 32, 8, 128, 36, True)
SHAPES = {"Qwen3-8B": LARGE, "Qwen3-4B": QWEN3_4B}
WORK = {
    "wgmma": [(name, rows) for all_rows in ((64, 65, 129, 16), (128, 32, 96, 48, 8)) for name in SHAPES
              for rows in all_rows],
    "triton": [(name, rows) for rows in (64, 1, 16, 32, 8, 24, 48, 128, 96) for name in SHAPES],
    "both": [(name, rows) for rows in (64, 16, 1, 72, 128, 96, 32, 48) for name in SHAPES],
}  # fmt: skip
KEYS = {"attend_input": "qkv", "output": "output", "feed_forward_input": "gate_up", "down": "down"}

Tiles = dict[tuple[str, int, int], WideTile | None]


def use(tiles: Tiles) -> None:
    """Run products by these tiles instead of by the measured table."""
    fast.wide_tile = lambda kind, _, columns, size: tiles.get((kind, columns, size))  # type: ignore[assignment]


def use_tuned(path: Path) -> None:
    """Run products by what `tune` chose for the next row count that it measured; by the table where it has none."""
    tuned: dict[tuple[str, int, int], dict[int, WideTile | None]] = {}
    for row in json.loads(path.read_text())["results"]:
        for *product, fields in row.get("chosen", []):
            tuned.setdefault(tuple(product), {})[row["rows"]] = fields and WideTile(**fields)
    of_table = wide_tiling.wide_tile

    def tile(kind: str, rows: int, columns: int, size: int) -> WideTile | None:
        found = tuned.get((kind, columns, size), {})
        measured = min((most for most in found if most >= rows > 1), default=None)
        return of_table(kind, rows, columns, size) if measured is None else found[measured]

    fast.wide_tile = tile  # type: ignore[assignment]


def launcher(own: PassOfRows, name: str) -> Callable[[], object]:
    """All layers' products of one kind."""
    shape, place, layers = own.shape, own.placement, own.layers
    gated = torch.randn(1, own.rows, shape.middle, device=own.start.device, dtype=BF16)
    stream = own.start.clone()
    norm = layers[0]["head_norm"] if shape.head_norms else None

    def launch() -> object:
        kept = []
        for i, layer in enumerate(layers):
            if name == "attend_input":
                query = fast.attend_input(
                    stream, layer["norm"], 1e-5, layer["qkv"], None, shape.head_dim, norm, norm,
                    place.cos, place.sin, own.cache[i], place.slots,
                )  # fmt: skip
                kept.append(query)
            elif name == "feed_forward_input":
                kept.append(fast.feed_forward_input(stream, layer["norm"], 1e-5, layer["gate_up"], None))
            else:
                fast.add_linear(stream, own.attended if name == "output" else gated, layer[name], None)
        return kept

    return launch


def results(own: PassOfRows, name: str, module: Any, dtype: torch.dtype) -> torch.Tensor:
    """What the first layer's product gives, in float32."""
    shape, place = own.shape, own.placement
    layer = {key: value.to(dtype) for key, value in own.layers[0].items() if key in (KEYS[name], "norm", "head_norm")}
    stream = own.start.to(dtype, copy=True)
    norm = layer["head_norm"] if shape.head_norms else None
    if name == "attend_input":
        cache = own.cache[0].to(dtype, copy=True)
        query = module.attend_input(
            stream, layer["norm"], 1e-5, layer["qkv"], None, shape.head_dim, norm, norm, place.cos, place.sin, cache,
            place.slots,
        )  # fmt: skip
        return torch.cat([query.flatten(), cache[:, place.slots[0]].flatten()]).float()
    if name == "feed_forward_input":
        return module.feed_forward_input(stream, layer["norm"], 1e-5, layer["gate_up"], None).flatten().float()
    x = own.attended
    if name == "down":
        generator = torch.Generator(stream.device).manual_seed(1)
        x = torch.randn(1, own.rows, shape.middle, device=stream.device, dtype=BF16, generator=generator)
    module.add_linear(stream, x.to(dtype), layer[name], None)
    return stream.flatten().float()


def errors(own: PassOfRows, name: str, want: torch.Tensor) -> dict[str, float]:
    got = results(own, name, fast, BF16)
    off = (got - want).abs()
    return {"max_error": round(float(off.max()), 4), "error": round(float(off.norm() / want.norm()), 5)}


class Ahead:
    """Compiles what is wanted in other processes, which never touch the GPU, into Triton's cache and ours."""

    def __init__(self, processes: int, by: str) -> None:
        self._by = by
        self._pool = multiprocessing.get_context("fork").Pool(processes)
        self._pending: dict[tuple[str, int], list[Any]] = {}

    def submit(self, work: list[tuple[str, int]]) -> None:
        for name, rows in work:
            shape = SHAPES[name]
            tasks = [
                (kind, rows, key, one, shape)
                for kind, key, tile in all_candidates(shape, rows, self._by)
                for one in (tile, replace(tile, calls_late=True), replace(tile, early=False))
            ]
            self._pending[name, rows] = [self._pool.apply_async(_compile, task) for task in tasks]

    def wait(self, name: str, rows: int) -> list[str]:
        """Until all kernels of these rows are there; the failures."""
        return [text for task in self._pending[name, rows] if (text := task.get()) is not None]

    def close(self) -> None:
        self._pool.terminate()


def all_candidates(shape: Shape, rows: int, by: str) -> list[tuple[str, tuple[int, int], WideTile]]:
    found = []
    for name, (kind, columns, size) in shape.products().items():
        known = wide_tiling.wide_tile(kind, rows, columns, size)
        tiles = candidates(kind, rows, columns, size, by) + ([known] if known is not None else [])
        found += [(name, (columns, size), tile) for tile in tiles]
    return found


def _compile(name: str, rows: int, key: tuple[int, int], tile: WideTile, shape: Shape) -> str | None:
    """Compile one product's kernels for compute capability 9.0, whatever machine this is."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class NoDevice:
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda _: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

    triton.runtime.driver.set_active(NoDevice())
    JITFunction.__getitem__ = lambda kernel, grid: partial(kernel.warmup, grid=grid)
    from ddtree.kernels import wide_layer_triton as wide

    wide_check.only_compile()

    columns, size = key
    weight, norm = torch.empty(columns, size, dtype=BF16), torch.empty(size, dtype=BF16)
    x, stream = (torch.empty(1, rows, of, dtype=BF16) for of in (size, columns))
    try:
        if name == "attend_input":
            head_norm = norm[: shape.head_dim] if shape.head_norms else None
            angle, cache = torch.empty(1, rows, shape.head_dim // 2), torch.empty(2, 8, shape.kv_heads, shape.head_dim)
            wide.attend_input(
                tile, x, norm, 1e-5, weight, None, shape.head_dim, head_norm, head_norm, angle, angle, cache.to(BF16),
                torch.zeros(1, rows, dtype=torch.int64),
            )  # fmt: skip
        elif name == "feed_forward_input":
            wide.feed_forward_input(tile, x, norm, 1e-5, weight, None)
        else:
            wide.add_linear(tile, stream, x, weight, None)
    except Exception as error:
        return f"{name} {rows} rows {brief(tile)}: {type(error).__name__}: {str(error)[-300:]}"
    return None


def measure_rows(own: PassOfRows, by: str, replays: int) -> dict[tuple[str, int, int], list[dict[str, Any]]]:
    """Every candidate of every product alone: cuBLAS, the measured table's, then the rest; those that are right."""
    table: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for full_name, product in own.shape.products().items():
        kind, columns, size = product
        name = full_name.split()[-1]
        use({})
        want = results(own, name, twins, torch.float32)
        run = launcher(own, name)
        read = 2 * columns * size * len(own.layers) / 1e9  # TB/s of a time in ms
        rows_of_table: list[dict[str, Any]] = []
        known = wide_tiling.wide_tile(kind, own.rows, columns, size)
        for tile in dict.fromkeys((None, known, *candidates(kind, own.rows, columns, size, by))):
            try:
                use({product: tile})
                found = errors(own, name, want)
                ms = graph_ms(run, replays)
            except Exception as error:
                print(f"  {name} {own.rows} rows {brief(tile)} failed: {str(error)[:200]}", flush=True)
                continue
            row = {"tile": brief(tile), "ms": round(ms, 4), "tb_s": round(read / ms, 3), **found}
            rows_of_table.append(row | {"fields": tile and asdict(tile)})
        today = rows_of_table[0]
        right = [row for row in rows_of_table if row["error"] <= 1.5 * today["error"] + 1e-4]
        order = sorted(right, key=lambda row: row["ms"])
        of_table = next((f"table {row['tb_s']:.2f}" for row in right if row["tile"] == brief(known) and known), "")
        wrong = [row["tile"] for row in rows_of_table if row not in right]
        print(
            f"  {name:18s} TB/s: cuBLAS {today['tb_s']:.2f} {of_table:10s} | "
            + "; ".join(f"{row['tb_s']:.2f} {row['tile']}" for row in order[:4])
            + (f"   WRONG: {wrong}" if wrong else ""),
            flush=True,
        )
        table[product] = order
    return table


def tune_rows(own: PassOfRows, by: str, replays: int) -> dict[str, Any]:
    """From the measured table on, one product at a time; a tile must win 0.3 % of all layers to be taken."""
    alone = measure_rows(own, by, replays)
    found: dict[str, Any] = {"alone": {"{} {}x{}".format(*product): rows for product, rows in alone.items()}}
    use({})
    found["today_ms"] = round(graph_ms(own.fused, replays), 4)
    today = own.fused().float()
    chosen: Tiles = {product: wide_tiling.wide_tile(product[0], own.rows, *product[1:]) for product in alone}
    use(chosen)
    best = graph_ms(own.fused, replays)
    found["table_ms"] = round(best, 4)
    tried: dict[str, dict[str, float]] = {}

    def attempt(product: tuple[str, int, int], tile: WideTile | None) -> None:
        nonlocal best
        try:
            use(chosen | {product: tile})
            ms = graph_ms(own.fused, replays)
        except Exception as error:
            print(f"  {product} {own.rows} rows {brief(tile)} failed: {str(error)[:200]}", flush=True)
            return
        tried.setdefault("{} {}x{}".format(*product), {})[brief(tile)] = round(ms, 4)
        if ms < 0.997 * best:
            chosen[product], best = tile, ms

    for product, order in alone.items():
        tiles = [WideTile(**row["fields"]) for row in order if row["fields"] is not None]
        # Alone a product is followed by no norm, which comes with the sums of stretches for nothing.
        for tile in dict.fromkeys((*tiles[:3], *[tile for tile in tiles if tile.leaves_sums][:1], None)):
            if tile != chosen[product]:
                attempt(product, tile)
    for product in chosen:
        if (tile := chosen[product]) is not None:
            attempt(product, replace(tile, calls_late=True))
    use(chosen)
    found["best_ms"] = round(graph_ms(own.fused, replays), 4)
    eager, graph = own.fused(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = own.fused()
    same = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        same.append(torch.equal(eager, replayed))
    found["graph_equals_eager"] = all(same)
    found["difference_to_today"] = round(float((eager.float() - today).norm() / today.norm()), 5)
    found["tiles"] = {"{} {}x{}".format(*key): brief(tile) for key, tile in chosen.items()}
    found["chosen"] = [[*key, tile and asdict(tile)] for key, tile in chosen.items()]
    return found | {"tried": tried}


def check_cases() -> list[wide_check.Case]:
    """Small ones first, then every candidate of the shapes."""
    cases = wide_check.small_cases()
    for shape in SHAPES.values():
        for kind, columns, size in shape.products().values():
            for rows in (64, 65, 129, 16):
                for tile in candidates(kind, rows, columns, size, "wgmma"):
                    cases.append(wide_check.Case(tile, rows, columns, size, kind == "feed_forward_input"))
    return cases


def measure(what: str, by: str, only_rows: list[int], out: Path, seconds: float, replays: int) -> None:
    start = time.monotonic()
    work = [(name, rows) for rows in only_rows for name in SHAPES] or WORK[by]
    ahead = Ahead(max(1, (os.cpu_count() or 2) - 2), by)
    ahead.submit(work)
    out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"torch": torch.__version__, "results": []}
    made: dict[str, list[Any]] = {}
    for name, rows in work:
        if time.monotonic() - start > seconds - 5:
            print(f"{seconds:.0f} s are over: {name} {rows} rows and what follows were not measured", flush=True)
            break
        for text in ahead.wait(name, rows):
            print("  not compiled:", text, flush=True)
        if name not in made:
            made[name] = make_layers(SHAPES[name])
            facts["device"] = torch.cuda.get_device_name()
        print(f"{name}, {rows} rows ({time.monotonic() - start:.0f} s)", flush=True)
        row: dict[str, Any] = {"shape": name, "rows": rows}
        try:
            own = PassOfRows(SHAPES[name], made[name], rows, 2048)
            if what == "products":
                row["products"] = list(measure_rows(own, by, replays).items())
            else:
                row |= tune_rows(own, by, replays)
                print("  ", {key: row[key] for key in row if key not in ("tried", "alone")}, flush=True)
        except Exception:
            row["failure"] = traceback.format_exc()
            print(row["failure"], flush=True)
        facts["results"].append(row)
        (out / f"wide_{what}.json").write_text(json.dumps(facts, indent=1))
    ahead.close()


def compile_all(by: str) -> None:
    """Every kernel; for a look without a GPU at whether they compile."""
    ahead = Ahead(max(1, (os.cpu_count() or 2) - 1), by)
    ahead.submit(WORK[by])
    failures = [text for name, rows in WORK[by] for text in ahead.wait(name, rows)]
    ahead.close()
    print(*failures, sep="\n")
    raise SystemExit(1 if failures else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "products", "tune", "compile"))
    parser.add_argument("--by", choices=tuple(WORK), default="wgmma", help="whose tiles are tried")
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="these instead of the usual ones")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--seconds", type=float, default=105)
    parser.add_argument("--replays", type=int, default=13, help="of each graph, the first 5 not counted")
    args = parser.parse_args()
    if args.what == "check":
        wide_check.run(check_cases(), args.out)
    elif args.what == "compile":
        compile_all(args.by)
    else:
        measure(args.what, args.by, args.rows, args.out, args.seconds, args.replays)


if __name__ == "__main__":
    main()
