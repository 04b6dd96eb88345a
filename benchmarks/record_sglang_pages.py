"""Starts real servers on a GPU, right and wrong ones, verifies each, and records the pages for replay.

    python benchmarks/record_sglang_pages.py --home HOME --out tests/verify/pages

``HOME`` is a folder made by ``ops_h200.py prepare``. All servers start at once on one GPU, since nothing here is timed.
Each case holds a server to a declaration; the exit code is 1 where a verdict is not the one that the case is for, or a
server did not come up. ``verdicts.json`` beside the servers' logs tells each, written as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from ops_home import ROOT, Home
from page_recorder import record
from servers import Server
from ways import Way, arguments, tree

from ddtree.verify import Expectation, Options

BUDGET, OTHER_BUDGET, WINDOW = 16, 8, 512
TREE = {"algorithm": "ddtree", "budget": BUDGET, "draft_window": None}
CHAIN = {"algorithm": "dflash", "budget": 15, "draft_window": None}
PLAIN = {"algorithm": "none"}

SGLANG_SERVERS = {
    "tree": tree(BUDGET),
    "chain": "--attention-backend fa3 SPEC DFLASH --speculative-num-draft-tokens 16",
    "plain": "--attention-backend fa3",
    "eager": tree(BUDGET) + " --disable-cuda-graph",
    "narrow": tree(OTHER_BUDGET),
    "window": tree(BUDGET) + f" --speculative-draft-window-size {WINDOW}",
    "random": tree(BUDGET),
}
NATIVE_SERVERS = {"native": "", "native_eager": "graphs"}
"""By name, with the fault of ``tests/verify/faulty_server.py`` that is built in."""


@dataclass(frozen=True)
class Case:
    """A server, what is declared of it, and the probes that must complain; none where all must be proven.

    Attributes:
        may: probes that may complain as well.
    """

    name: str
    server: str
    declared: Mapping[str, Any]
    must: frozenset[str] = field(default_factory=frozenset)
    may: frozenset[str] = field(default_factory=frozenset)


OTHERS_SEE_IT = frozenset({"concurrency", "long context"})
"""Where drafts are never accepted at all; a random drafter gets a few right."""

CASES = (
    Case("sglang_ddtree_right", "tree", TREE),
    Case("sglang_dflash_right", "chain", CHAIN),
    Case("sglang_none_right", "plain", PLAIN),
    Case("sglang_no_speculation", "plain", TREE, frozenset({"settings", "speculation"})),
    Case("sglang_other_algorithm", "chain", TREE, frozenset({"settings", "speculation"})),
    Case("sglang_graphs_off", "eager", TREE, frozenset({"settings", "graphs"})),
    Case("sglang_other_budget", "narrow", TREE, frozenset({"settings", "speculation"})),
    Case("sglang_other_window", "window", TREE, frozenset({"settings"})),
    Case("sglang_random_drafter", "random", TREE, frozenset({"speculation"}), OTHERS_SEE_IT),
    Case("native_gpu_right", "native", TREE),
    Case("native_gpu_graphs_off", "native_eager", TREE, frozenset({"graphs"}), frozenset({"settings"})),
)  # fmt: skip


class NativeServer(Server):
    """``ddtree serve``, started as the SGLang servers are."""

    def start(self, environment: dict[str, str], folder: Path) -> None:
        self.log = folder / f"{self.name}.log"
        fault = NATIVE_SERVERS[self.name]
        program = [str(ROOT / "tests" / "verify" / "faulty_server.py"), fault] if fault else ["-m", "ddtree"]
        command = [sys.executable, *program, "serve", "--port", str(self.port), *self.arguments]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def is_ready(self) -> bool:
        try:
            self.get("/ready", timeout=2)
        except OSError:
            return False
        return True


class Recording:
    """One run over the chosen cases."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.home = given, Home(given.home)
        self.cases = [case for case in CASES if (not given.only or case.name in given.only)]
        self.told: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._random = given.home / "models" / "random-drafter"

    def run(self) -> bool:
        """Whether every verdict is as expected."""
        names = list(dict.fromkeys(case.server for case in self.cases))
        if "random" in names:
            random_twin(self.home.drafter, self._random)
        self.given.logs.mkdir(parents=True, exist_ok=True)
        servers = [self._server(name, self.given.port + 200 * place) for place, name in enumerate(names)]
        pool = ThreadPoolExecutor(len(servers))
        try:
            for server in servers:
                own = {} if isinstance(server, NativeServer) else self.home.sglang_variables()
                server.start(self.home.environment() | own, self.given.logs)
            list(pool.map(self._cases_of, servers))
        finally:  # the servers first: threads may wait for their answers
            for server in servers:
                server.stop()
            pool.shutdown(wait=False, cancel_futures=True)
        return all(each["as_expected"] for each in self.told) and len(self.told) == len(self.cases)

    def _server(self, name: str, port: int) -> Server:
        drafter = self._random if name == "random" else self.home.drafter
        if name in SGLANG_SERVERS:
            line = arguments(Way(SGLANG_SERVERS[name]), str(self.home.target), str(drafter))
            return Server(name, [*line, "--served-model-name", "target", *self.given.sglang_flags.split()], port)
        line = ["--model", str(self.home.target), "--draft", str(drafter), "--served-model-name", "target"]
        line += ["--mode", "tree", "--budget", str(BUDGET), "--device", self.given.device, "--max-batch", "4"]
        return NativeServer(name, [*line, "--max-model-len", "4096", "--memory-fraction", "0.05"], port)

    def _cases_of(self, server: Server) -> None:
        """All cases of a server, one after the other; each is told, also where it could not be tried."""
        mine = [case for case in self.cases if case.server == server.name]
        began = time.monotonic()
        while server.alive() and not server.is_ready() and time.monotonic() - began < self.given.start_timeout:
            time.sleep(0.5)
        for case in mine:
            try:
                told = self._verified(server, case)
            except Exception as error:
                traceback.print_exc()
                told = {"verdict": "none", "as_expected": False, "error": repr(error)[:300], "log": server.tail(25)}
            self._tell({"case": case.name} | told | {"seconds": round(time.monotonic() - began)})

    def _verified(self, server: Server, case: Case) -> dict[str, Any]:
        url, engine = f"http://127.0.0.1:{server.port}", "sglang" if server.name in SGLANG_SERVERS else "native"
        body = {"model": "target", "prompt": "1, 2, 3,", "max_tokens": 4, "temperature": 0}
        server.post("/v1/completions", body, timeout=120)  # the first answer compiles kernels
        declared = dict(case.declared) | {"model": str(self.home.target)}
        if case.declared["algorithm"] != "none":
            declared["drafter"] = str(self._random if server.name == "random" else self.home.drafter)
        if engine == "sglang":
            declared |= {"attention_backend": "fa3", "tp": 1}
        expectation = Expectation(
            engine=engine,
            model_name="target",
            speculates="none" if case.declared["algorithm"] == "none" else "yes",
            settings=declared,
            graphs=True,
            origin="the case",
        )
        options = Options(probe_tokens=32, long_tokens=512, speed_tokens=48, baseline=False)
        renamed = {
            str(self._random): "/models/drafter",
            str(self.home.drafter): "/models/drafter",
            str(self.home.target): "/models/target",
            str(self.home.root): "/opt",
            str(ROOT): "/src",
            str(Path.home()): "~",
        }
        file = self.given.out / f"{case.name}.json"
        verdict = record(url, expectation, options, file, f"{engine} on one GPU, case {case.name}", renamed)
        complained = {f.probe for f in verdict.findings if f.status.value == "violated"}
        is_right = case.must <= complained <= case.must | case.may
        lines = [f"{f.status.value}: {f.claim} ({'; '.join(f.evidence)})" for f in verdict.findings]
        return {
            "verdict": verdict.status.value,
            "as_expected": is_right and (bool(case.must) or verdict.status.value == "proven"),
            "complained": sorted(complained),
            "must": sorted(case.must),
            "findings": [line for line in lines if not line.startswith("proven")],
            "measured": verdict.measured,
        }

    def _tell(self, told: dict[str, Any]) -> None:
        with self._lock:
            self.told.append(told)
            print(json.dumps(told), flush=True)
            part = self.given.logs / "verdicts.part"
            part.write_text(json.dumps(sorted(self.told, key=lambda each: each["case"]), indent=1) + "\n")
            part.replace(self.given.logs / "verdicts.json")


def random_twin(folder: Path, to: Path) -> None:
    """A drafter of the same shapes with random matrices; norms and other vectors stay."""
    if to.exists():
        return
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


def as_dtype(values: np.ndarray, dtype: str) -> bytes:
    """Bytes of float32 values in a safetensors dtype."""
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("page-logs"), help="folder for the servers' logs")
    parser.add_argument("--port", type=int, default=21000, help="the first of a range")
    parser.add_argument("--device", default="cuda", help="of the native servers")
    parser.add_argument("--sglang-flags", default="", help="further ones of each SGLang server, in one argument")
    parser.add_argument("--start-timeout", type=float, default=200, metavar="S")
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES], metavar="CASE")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    is_right = Recording(given).run()
    print("every verdict is as expected" if is_right else "some verdicts are not as expected", flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # not held up by what a broken server left open
