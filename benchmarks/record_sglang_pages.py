"""Starts a real SGLang in several configurations, right and wrong ones, verifies each, and records the pages.

    python benchmarks/record_sglang_pages.py --model TARGET --draft DRAFTER --out tests/verify/pages

Needs a GPU and an interpreter that imports sglang (`--python`). Each case is declared as the first one is: speculation
by the drafter, the same width, CUDA graphs on. The exit code is 1 where a verdict is not the one that the case is for.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from page_recorder import record

from ddtree.verify import Expectation, Options

WIDTH = 16
WINDOW = 512


@dataclass(frozen=True)
class Case:
    """Flags against the right configuration, and the probes that must complain; none where all must be proven."""

    name: str
    complains: frozenset[str]
    flags: tuple[str, ...] = ()
    without_speculation: bool = False
    random_drafter: bool = False
    width: int = WIDTH
    window: int | None = None


CASES = (
    Case("right", frozenset()),
    Case("no_speculation", frozenset({"settings", "speculation"}), without_speculation=True),
    Case("graphs_off", frozenset({"settings", "graphs"}), ("--disable-cuda-graph",)),
    Case("other_width", frozenset({"settings", "speculation"}), width=WIDTH // 2),
    Case("other_window", frozenset({"settings"}), window=WINDOW),
    Case("random_drafter", frozenset({"speculation"}), random_drafter=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--algorithm", default="DFLASH", choices=["DFLASH", "DDTREE"])
    parser.add_argument("--attention-backend", default="fa3")
    parser.add_argument("--port", type=int, default=30100)
    parser.add_argument("--start-timeout", type=float, default=240, metavar="S")
    parser.add_argument("--only", nargs="*", metavar="CASE")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="more flags of SGLang, after --")
    given = parser.parse_args()
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in CASES:
            if given.only and case.name not in given.only:
                continue
            began = time.monotonic()
            draft = random_twin(given.draft, Path(scratch) / "drafter") if case.random_drafter else given.draft
            told = run_case(given, case, draft)
            print(json.dumps(told | {"seconds": round(time.monotonic() - began)}), flush=True)
            if set(told["complains"]) != case.complains or (not case.complains and told["verdict"] != "proven"):
                wrong.append(case.name)
    print(f"not as expected: {', '.join(wrong)}" if wrong else "every verdict is as expected")
    return bool(wrong)


def run_case(given: argparse.Namespace, case: Case, draft: Path) -> dict:
    """Start, verify, stop."""
    command = [
        given.python, "-m", "sglang.launch_server", "--model-path", str(given.model), "--port", str(given.port),
        "--served-model-name", "target", "--attention-backend", given.attention_backend,
        "--sampling-backend", "pytorch",
        "--cuda-graph-max-bs", "4", "--mem-fraction-static", "0.3", "--context-length", "4096", "--skip-server-warmup",
        "--enable-metrics", *case.flags, *given.flags,
    ]  # fmt: skip
    if not case.without_speculation:
        command += ["--speculative-algorithm", given.algorithm, "--speculative-draft-model-path", str(draft)]
        command += ["--speculative-num-draft-tokens", str(case.width)]
        if case.window:
            command += ["--speculative-draft-window-size", str(case.window)]
    declared = {
        "algorithm": given.algorithm.lower(),
        "budget": WIDTH - 1,
        "draft_window": None,
        "model": str(given.model),
        "drafter": str(draft),
        "attention_backend": given.attention_backend,
        "tp": 1,
    }
    expectation = Expectation(engine="sglang", settings=declared, graphs=True, origin="the case")
    log = Path(tempfile.gettempdir()) / f"sglang_{case.name}.log"
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{given.port}"
    try:
        await_server(server, url, given.start_timeout, log)
        options = Options(probe_tokens=48, long_tokens=1024, baseline=False)
        out = given.out / f"sglang_{given.algorithm.lower()}_{case.name}.json"
        renamed = {
            str(given.model): "/models/target",
            str(given.draft): "/models/drafter",
            str(draft): "/models/drafter",
        }
        verdict = record(url, expectation, options, out, f"SGLang, {given.algorithm}, case {case.name}", renamed)
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    found = {f.probe for f in verdict.findings if f.status.value == "violated"}
    told = [f"{f.status.value}: {f.claim} ({'; '.join(f.evidence)})" for f in verdict.findings]
    return {
        "case": case.name,
        "verdict": verdict.status.value,
        "complains": sorted(found),
        "expected": sorted(case.complains),
        "findings": [line for line in told if not line.startswith("proven")],
        "measured": verdict.measured,
    }


def await_server(server: subprocess.Popen, url: str, timeout_s: float, log: Path) -> None:
    """Until a completion comes back."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            body = {"text": "1, 2, 3,", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
            if httpx.post(f"{url}/generate", json=body, timeout=60).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(1)
    raise SystemExit(f"SGLang did not come up:\n{log.read_text(errors='replace')[-4000:]}")


def random_twin(folder: Path, to: Path) -> Path:
    """A drafter of the same shapes with random matrices; norms and other vectors stay."""
    if not to.exists():
        shutil.copytree(folder, to)
        for file in to.glob("*.safetensors"):
            raw = bytearray(file.read_bytes())
            (size,) = struct.unpack("<Q", raw[:8])
            noise = np.random.default_rng(0)
            for name, tensor in json.loads(raw[8 : 8 + size]).items():
                if name == "__metadata__" or len(tensor["shape"]) < 2:
                    continue
                values = noise.standard_normal(tensor["shape"], dtype=np.float32) / tensor["shape"][-1] ** 0.5
                begin, end = (8 + size + offset for offset in tensor["data_offsets"])
                raw[begin:end] = as_dtype(values, tensor["dtype"])
            file.write_bytes(raw)
    return to


def as_dtype(values: np.ndarray, dtype: str) -> bytes:
    """Bytes of float32 values in a safetensors dtype."""
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()


if __name__ == "__main__":
    sys.exit(main())
