"""Whether products of large weights by wgmma are right, to the bit; run by `wide_h200.py check`.

Inputs are small whole numbers, whose sums are exact in any order. Cases run in a process of their own, which is started
anew behind a case that ends it; a kernel that waits for two seconds ends itself.
"""

import json
import queue
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from compile_ahead import HOPPER, compile_ahead

from ddtree.kernels import cuda_module, wide_products_cuda
from ddtree.kernels.wide_products_cuda import SOURCE, multiply
from ddtree.kernels.wide_tiling import WideTile

DEVICE = "cuda"
PATIENCE_MS = 2000
FIRST_SECONDS, CASE_SECONDS, DEATHS = 60, 10, 4
_DEFINES = wide_products_cuda.defines


@dataclass(frozen=True)
class Case:
    tile: WideTile
    rows: int
    columns: int
    size: int
    gated: bool


def patient_defines(tile: WideTile, rows: int, gated: bool) -> dict[str, int]:
    return _DEFINES(tile, rows, gated) | {"PATIENCE_MS": PATIENCE_MS}


def small_cases() -> list[Case]:
    """From the simplest on: whoever is wrong first has the fewest parts."""
    plain = WideTile(64, 64, stages=2, by="wgmma", early=False)
    one_step = Case(plain, 8, 64, 64, False)
    cases = [one_step, Case(plain, 64, 64, 64, False), Case(plain, 64, 64, 128, False)]
    cases += [Case(plain, rows, 128, 640, False) for rows in (1, 8, 20, 64, 65, 96, 136)]
    for more in (
        {"columns": 192}, {"columns": 256, "stages": 3}, {"depth": 128}, {"early": True}, {"calls_late": True},
        {"splits": 3}, {"splits": 3, "joined": True}, {"splits": 5, "joined": True, "columns": 128},
    ):  # fmt: skip
        tile = WideTile(**{**asdict(plain), **more})
        cases += [Case(tile, rows, 768, 640, gated) for gated in (False, True) for rows in (9, 72)]
    return cases


def whole(*shape: int, most: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(-most, most + 1, shape, device=DEVICE, generator=generator, dtype=torch.int8).bfloat16()


@lru_cache(maxsize=2)
def _weight(columns: int, size: int) -> torch.Tensor:
    return whole(columns, size)


@lru_cache(maxsize=1)
def _exact(rows: int, columns: int, size: int, begin: int, end: int) -> torch.Tensor:
    return whole(rows, size, seed=1)[:, begin:end].double() @ _weight(columns, size)[:, begin:end].double().T


def examine(case: Case) -> str:
    """Empty where it is right, else what is wrong."""
    tile, rows, columns, size = case.tile, case.rows, case.columns, case.size
    x, weight = whole(rows, size, seed=1), _weight(columns, size)
    bias, stream = whole(columns, seed=2), whole(rows, columns, most=50, seed=3)
    torch.cuda.synchronize()
    if tile.leaves_sums:
        stretch = -(-(size // tile.depth) // tile.splits) * tile.depth
        got = multiply(tile, x, weight, bias, gated=case.gated)
        for split in range(tile.splits):
            begin, end = split * stretch, min((split + 1) * stretch, size)
            want = _exact(rows, columns, size, begin, end).float()
            if text := difference(got[split], want, case):
                return f"stretch {split}: {text}"
        return ""
    total = _exact(rows, columns, size, 0, size) + bias.double()
    if case.gated:
        gate, up = total.bfloat16().chunk(2, -1)
        return difference(
            multiply(tile, x, weight, bias, gated=True), torch.nn.functional.silu(gate.float()).bfloat16() * up, case
        )
    taps = torch.full((rows, 3, columns), 7.0, device=DEVICE, dtype=torch.bfloat16)
    want = (total + stream.double()).bfloat16()
    if text := difference(multiply(tile, x, weight, bias), total.bfloat16(), case):
        return text
    multiply(tile, x, weight, bias, stream=stream, tap=taps[:, 1])
    if text := difference(stream, want, case) or difference(taps[:, 1], want, case):
        return f"with stream and tap: {text}"
    return "" if bool((taps[:, ::2] == 7).all()) else "written beside the tap"


def difference(got: torch.Tensor, want: torch.Tensor, case: Case) -> str:
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    got, want = got.float(), want.float()
    wrong = (got - want).abs() > (0.01 * want.abs() if case.gated and not case.tile.leaves_sums else 0)
    wrong |= got.isnan()
    if not bool(wrong.any()):
        return ""
    row, column = (int(i) for i in wrong.nonzero()[0])
    own = case.tile.columns // 2 if case.gated and not case.tile.leaves_sums else case.tile.columns
    inside = sorted({int(c) % own for c in wrong.any(0).nonzero().flatten()})
    text = (
        f"{int(wrong.sum())} of {wrong.numel()} ({int(got.isnan().sum())} NaN), first at row {row} column {column}: "
        f"{float(got[row, column]):g} instead of {float(want[row, column]):g}; rows {spans(wrong.any(1))}; "
        f"columns of a block {spans_of(inside)}; blocks "
        f"{spans_of(sorted({int(c) // own for c in wrong.any(0).nonzero().flatten()}))}"
    )
    return text


def spans(which: torch.Tensor) -> str:
    return spans_of([int(i) for i in which.nonzero().flatten()])


def spans_of(numbers: list[int]) -> str:
    """As ``0-7, 16``; at most eight of them."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found[:8])
    return text + (f" and {len(found) - 8} more" if len(found) > 8 else "")


def probe(case: Case) -> str:
    """Which weight (column, k) really met a row that is one at a single k: tells a wrong descriptor from one run."""
    tile, rows, columns, size = case.tile, min(case.rows, 64), case.columns, case.size
    if tile.leaves_sums or case.gated:
        return ""
    ks = torch.arange(rows, device=DEVICE) * 37 % size
    x = torch.nn.functional.one_hot(ks, size).bfloat16()
    column, k = torch.arange(columns, device=DEVICE) % 256, torch.arange(size, device=DEVICE) % 256
    met = [
        multiply(tile, x, of.expand(columns, size).bfloat16().contiguous(), None).float()
        for of in (column[:, None], k[None])
    ]
    lines = []
    for row, at in ((0, 0), (1, 0), (0, 1), (0, 8), (0, 16), (9 % rows, 3), (rows - 1, columns - 1)):
        lines.append(
            f"row {row} (one at k {int(ks[row])}) x column {at}: met column {float(met[0][row, at]):g}, "
            f"k {float(met[1][row, at]):g} (both modulo 256)"
        )
    return "\n      ".join(lines)


def only_compile() -> None:
    """From now on `multiply` compiles its kernel for compute capability 9.0 and launches nothing."""

    class Compiled:
        def __init__(self, source: str, _: torch.device, **defines: int) -> None:
            self.image = cuda_module.machine_code(source, cuda_module.in_order(defines), HOPPER)

        def launch(self, *arguments: object, early: bool = False) -> None:
            pass

    changed: Any = wide_products_cuda
    changed.cuda_module, changed.tensor_map = Compiled, lambda *_: None


def _run_cases(cases: list[Case], first: int) -> None:
    """In a process of its own: a line before and behind each case."""
    changed: Any = wide_products_cuda
    changed.defines = patient_defines
    probed = 0
    for i, case in enumerate(cases[first:], first):
        print(json.dumps([i, None]), flush=True)
        text = examine(case)
        torch.cuda.synchronize()
        if text and probed < 2 and (found := probe(case)):
            probed += 1
            text += f"\n      {found}"
        print(json.dumps([i, text]), flush=True)


def _follow(cases: list[Case], first: int, found: dict[int, str]) -> int:
    """Run cases from ``first`` on until all are done or their process ends; the next one."""
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, __file__, str(first)], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    child.stdin.write(json.dumps([asdict(case) for case in cases]))
    child.stdin.close()
    lines: queue.Queue[str] = queue.Queue()
    said: list[str] = []
    readers = [
        threading.Thread(target=lambda: [lines.put(line) for line in child.stdout] + [lines.put("")], daemon=True),
        threading.Thread(target=lambda: said.extend(child.stderr), daemon=True),
    ]
    for reader in readers:
        reader.start()
    at, limit = first, float(FIRST_SECONDS)
    end = ""
    while True:
        try:
            line = lines.get(timeout=limit)
        except queue.Empty:
            end = f"no end after {limit:g} s"
            break
        if not line:
            child.wait()
            told = [said_line.strip() for said_line in said if "Error" in said_line or "error" in said_line]
            end = f"its process ended ({child.returncode}): {' | '.join(told[-2:])[-300:]}"
            break
        at, text = json.loads(line)
        if text is not None:
            found[at], at, limit = text, at + 1, float(CASE_SECONDS)
    child.kill()
    child.wait()
    if at < len(cases):
        found[at] = end
        at += 1
    return at


def name_of(case: Case) -> str:
    tile = case.tile
    ways = [word for word in ("joined", "early", "calls_late") if getattr(tile, word)]
    return (
        f"{case.rows} rows x {case.columns} x {case.size}{' gated' if case.gated else ''}: "
        f"block {tile.columns}x{tile.depth}, {tile.stages} stages, {tile.splits} splits"
        f"{''.join(f', {way}' for way in ways)}"
    )


def run(cases: list[Case], out: Path) -> None:
    """All cases; says which are wrong and how, and ends with 1 where there are any."""
    start = time.monotonic()
    compile_ahead(SOURCE, (patient_defines(case.tile, case.rows, case.gated) for case in cases))
    found: dict[int, str] = {}
    at = deaths = 0
    while at < len(cases) and deaths < DEATHS:
        at = _follow(cases, at, found)
        deaths += at < len(cases)
    wrong = {i: text for i, text in found.items() if text}
    for i, text in list(wrong.items())[:24]:
        print(f"  WRONG {name_of(cases[i])}\n    {text}", flush=True)
    print(
        f"{len(found) - len(wrong)} of {len(cases)} products right, {len(wrong)} wrong, "
        f"{len(cases) - len(found)} not run; {time.monotonic() - start:.0f} s",
        flush=True,
    )
    kinds: dict[str, list[int]] = {}
    for i, text in found.items():
        tile = cases[i].tile
        for kind in (f"{tile.columns} columns", f"depth {tile.depth}",
                     f"{tile.splits} splits{' joined' * tile.joined}", f"{cases[i].rows} rows",
                     "gated" if cases[i].gated else "not gated"):  # fmt: skip
            kinds.setdefault(kind, [0, 0])[bool(text)] += 1
    if wrong:
        print("right and wrong by kind: " + "; ".join(f"{kind} {a}/{b}" for kind, (a, b) in kinds.items()))
    out.mkdir(parents=True, exist_ok=True)
    (out / "wide_check.json").write_text(json.dumps([[name_of(cases[i]), text] for i, text in found.items()], indent=1))
    raise SystemExit(1 if wrong or len(found) < len(cases) else 0)


if __name__ == "__main__":
    _run_cases(
        [Case(**{**fields, "tile": WideTile(**fields["tile"])}) for fields in json.load(sys.stdin)], int(sys.argv[1])
    )
