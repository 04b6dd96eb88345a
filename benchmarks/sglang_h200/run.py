"""DDTREE in SGLang on GPUs: many servers side by side; speeds, texts against plain decoding, draws, pool.

    python benchmarks/sglang_h200/run.py --kit DIR --target DIR --drafter DIR --prompts DIR --out DIR
        [--only SERVER ...] [--pieces NAME ...]

Several runs may go on at once on different GPUs (CUDA_VISIBLE_DEVICES), each with a ``--slot`` of its own.

Servers start together, since most of a start is imports, or ``--together`` so many at a time: those run all pieces and
end before the next start. Speeds are taken of one server at a time, in turn, the others idle. A piece that fails or
takes too long says so and the next has its turn; what is known is written after each, and
after ``--seconds`` all is ended. Exit code 0 only where every server started, every piece is done and nothing failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from pieces import CONCURRENCIES, PIECES
from servers import Answer, Server
from tiny_moe import make_pair
from ways import WAYS, Way, arguments

from kit import environment, plugin_path, site_folder

SLOTS = ("", "texts", "draws", "pool", "v0517", "flashinfer", "moe", "moe2", "speeds", "auto")
"""Each has ports of its own, below those that the system hands out."""

FIRST_PORT, PORTS_A_SLOT, PORTS_A_SERVER = 10000, 2000, 20


class Benchmark:
    """One run: its servers, what it found, and its time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begun = args, time.time()
        self.results: dict[str, Any] = {"command": [Path(sys.argv[0]).name, *sys.argv[1:]], "not_started": []}
        self.results |= {key: {} for key in ("pieces", "failed", "ways", "speeds", "checks", "budgets")}
        self.ready: set[str] = set()
        self.deadlines: dict[str, float] = {}
        self.servers: dict[str, Server] = {}
        self.texts: dict[str, list[Answer]] = {}
        self.batched: dict[str, list[Answer]] = {}
        self.ending = threading.Lock()

    def left(self) -> float:
        return float(self.args.seconds - (time.time() - self.begun))

    def say(self, *words: Any) -> None:
        print(f"[{time.time() - self.begun:5.0f}]", *words, flush=True)

    # -- servers ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        site = site_folder(self.args.kit, self.args.sites.resolve(), self.args.overlay)
        self.logs = self.args.out / "logs"
        self.logs.mkdir(exist_ok=True)
        self.env = environment(site, plugin_path(self.args.out.resolve() / "plugin"))
        if "auto" in self.args.pieces:  # nothing that was measured before
            self.env["DDTREE_CACHE"] = str(self.args.out.resolve() / "cache")
        self.pairs: dict[int | None, tuple[Path, Path]] = {None: (self.args.target, self.args.drafter)}
        for latent in {WAYS[name].moe for name in self.args.only} - {None}:
            made = self.args.sites.resolve() / f"moe-{self.args.slot}"
            self.pairs[latent] = make_pair(self.args.target, made, int(latent))
        self.say("kit ready")

    def groups(self) -> list[list[str]]:
        """Servers by when they run: all at once, or ``--together`` of them at a time."""
        names, size = self.args.only, self.args.together or len(self.args.only)
        return [names[first : first + size] for first in range(0, len(names), size)]

    def work(self, names: list[str]) -> None:
        """Start servers and run all pieces on them."""
        for name in names:
            self.start_one(name, WAYS[name])
        self.side_by_side([(name, lambda n=name: self.greet(n)) for name in names])
        for piece in self.args.pieces:
            self.piece(piece, names)

    def stop(self, names: list[str]) -> None:
        for name in names:
            self.servers[name].stop()
        self.ready -= set(names)

    def start_one(self, name: str, way: Way) -> Server:
        target, drafter = self.pairs[way.moe]
        port = FIRST_PORT + PORTS_A_SLOT * SLOTS.index(self.args.slot) + PORTS_A_SERVER * len(self.servers)
        line = arguments(way, str(target), str(drafter))
        server = self.servers[name] = Server(name, line, port, way.environment)
        server.start(self.env, self.logs)
        return server

    def wait(self, server: Server, seconds: float | None = None) -> bool:
        begun, seconds = time.time(), seconds or self.args.start_seconds
        while time.time() - begun < seconds and self.left() > 0:
            if not server.alive():
                self.say(f"=== {server.name}: ended at start\n{server.tail(60)}\n")
                return False
            if server.is_ready():
                server.ready_s = round(time.time() - begun, 1)
                self.say(f"{server.name}: ready after {server.ready_s:.0f} s")
                return True
            time.sleep(0.5)
        self.say(f"=== {server.name}: not ready\n{server.tail(25)}\n")
        return False

    def greet(self, name: str) -> None:
        """Wait for a server and have its first answer, which compiles kernels."""
        server = self.servers[name]
        if not self.wait(server):
            self.results["not_started"].append(name)
            return
        server.generate(self.prompts[0], timeout=120)
        self.way(name)
        self.ready.add(name)

    def guarded(self, name: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returns; None where it fails, with the server's last words."""
        try:
            return work()
        except Exception as error:
            server = self.servers.get(name)
            self.say(f"=== {name}: {error!r}")
            self.results["failed"].setdefault(name, []).append(repr(error)[:300])
            traceback.print_exc(limit=-3)
            if server is not None:
                print(server.tail(70), flush=True)
            return None

    def side_by_side(self, jobs: list[tuple[str, Callable[[], Any]]]) -> None:
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(lambda job: self.guarded(*job), jobs))

    # -- pieces ----------------------------------------------------------------------------------------------------

    def piece(self, name: str, servers: list[str]) -> None:
        """Run one piece, for its own time at most: one that fails or hangs leaves the rest their time."""
        work, seconds = PIECES[name]
        seconds = min(seconds, self.left() - 2)
        row = self.results["pieces"][self.told(name, servers)] = {"state": "no time left"}
        if seconds < 5:
            return
        begun = time.time()
        self.deadlines[name] = begun + seconds
        row["state"] = "out of time"

        def attempt() -> None:
            try:
                work(self)
                row["state"] = "stopped early" if self.is_late(name) else "done"
            except Exception as error:
                row["state"] = f"failed: {error!r}"[:300]
                traceback.print_exc(limit=-3)

        thread = threading.Thread(target=attempt, name=name, daemon=True)
        thread.start()
        thread.join(seconds + 2)
        row["seconds"] = str(round(time.time() - begun, 1))
        self.say(f"{self.told(name, servers)}: {row}")
        self.write()

    def told(self, piece: str, servers: list[str]) -> str:
        """What results call a piece: with its servers where it runs more than once."""
        return piece if len(servers) == len(self.args.only) else f"{piece} of {', '.join(servers)}"

    def is_late(self, piece: str) -> bool:
        return time.time() > self.deadlines[piece]

    def needs(self, *names: str) -> list[Server]:
        """Servers that a piece cannot do without."""
        if missing := [name for name in names if name not in self.ready]:
            raise LookupError(f"{', '.join(missing)} is not ready")
        return [self.servers[name] for name in names]

    def must(self, name: str, holds: bool, what: str) -> None:
        """Note a finding that should not be as a failure of that server, so that the run does not end well."""
        if not holds:
            self.say(f"=== {name}: {what}")
            self.results["failed"].setdefault(name, []).append(what)

    def way(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = self.results["ways"].setdefault(name, {"ready_s": self.servers[name].ready_s})
        return row

    def note(self, name: str, found: Any) -> None:
        self.results["checks"][name] = found
        self.say(f"{name}: {json.dumps(found)}")

    def table(self) -> None:
        """Medians over the repeats, and the quartiles where there are enough: a request at c=1, else all together."""
        if not self.results["speeds"]:
            return
        print(f"== {self.args.slot}: tok/s, median [quartiles]; of a request at c=1, of all together at c=4 and 16")
        for name, rows in self.results["speeds"].items():
            cells = []
            for c in CONCURRENCIES:
                runs = rows.get(f"c{c}", [])
                speeds = [run["request_tok_s" if c == 1 else "total_tok_s"] for run in runs]
                if len(runs) > 1:
                    low, middle, high = quantiles(speeds, n=4, method="inclusive")
                    cells.append(f"c{c} {middle:7.0f} [{low:.0f}, {high:.0f}] of {len(runs)}, tau {runs[0]['tau']:.2f}")
                elif runs:
                    cells.append(f"c{c} {speeds[0]:7.0f}, tau {runs[0]['tau']:.2f}")
            print(f"== {name:13}" + "  ".join(cells), flush=True)

    def write(self) -> None:
        """What is known so far, in one step, so that nothing half-written stays."""
        with self.ending:
            part = self.args.out / "results.json.part"
            part.write_text(json.dumps(self.results, indent=1))
            part.replace(self.args.out / "results.json")

    def end(self) -> None:
        for server in list(self.servers.values()):
            server.stop()
        self.write()
        self.say("all ended")
        self.summary()

    def summary(self) -> None:
        """In few lines, each marked for `slot.sh`: how far it came, and what is not as it should be."""
        name = self.args.slot or "run"
        for piece, row in self.states().items():
            print(f"== {name}: {piece} {row['state']} ({row.get('seconds', 0)} s)")
        for server in self.results["not_started"]:
            print(f"== {name}: {server} DID NOT START")
        for server, faults in self.results["failed"].items():
            print(f"== {name}: {server} FAILED {'; '.join(faults)[:200]}")
        sys.stdout.flush()

    def states(self) -> dict[str, dict[str, str]]:
        """How far each piece of each group came."""
        pieces = [self.told(piece, names) for names in self.groups() for piece in self.args.pieces]
        return {piece: self.results["pieces"].get(piece, {"state": "not begun"}) for piece in pieces}

    def out_of_time(self) -> None:
        self.say("out of time")
        self.end()
        os._exit(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("kit", "target", "drafter", "prompts", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--slot", default="", choices=SLOTS, help="whose ports to use")
    parser.add_argument("--sites", type=Path, default=Path("sites"), help="where kits are unpacked to, shared by slots")
    parser.add_argument("--overlay", type=Path, help="wheel of another SGLang, put over the kit's")
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS), help="servers to start")
    parser.add_argument("--together", type=int, help="servers at a time; all where left out")
    parser.add_argument("--pieces", nargs="*", default=list(PIECES), choices=list(PIECES), help="what to do with them")
    parser.add_argument("--count", type=int, default=20, help="prompts, half of them maths, half code")
    parser.add_argument("--draws", type=int, default=480, help="draws a case at temperature above 0")
    parser.add_argument("--soak", type=int, default=3000, help="requests of the soak")
    parser.add_argument("--repeats", type=int, default=8, help="speeds at most so often")
    parser.add_argument("--seconds", type=float, default=560, help="after that all is ended")
    parser.add_argument("--start-seconds", type=float, default=320, help="to wait for servers at most")
    args = parser.parse_args()
    args.target, args.drafter = args.target.resolve(), args.drafter.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    run = Benchmark(args)
    guard = threading.Timer(args.seconds + 4, run.out_of_time)
    guard.daemon = True
    guard.start()
    try:
        run.start()
        run.prompts = read_prompts(args, run.env)
        for names in run.groups():
            run.work(names)
            run.stop(names)
        run.table()
    except Exception:
        traceback.print_exc()
    finally:
        guard.cancel()
        run.end()
    unfinished = [piece for piece, row in run.states().items() if row["state"] != "done"]
    sys.stdout.flush()
    os._exit(
        1 if unfinished or run.results["failed"] or run.results["not_started"] else 0
    )  # not held up by the threads of a piece that hangs


def read_prompts(args: argparse.Namespace, env: dict[str, str]) -> list[list[int]]:
    """Token ids of chat prompts, made in the kit's environment."""
    code = (
        "import json, sys; from transformers import AutoTokenizer; t = AutoTokenizer.from_pretrained(sys.argv[1]);"
        "print(json.dumps([t.apply_chat_template([{'role': 'user', 'content': q}], add_generation_prompt=True,"
        " tokenize=True, return_dict=False) for q in json.load(sys.stdin)]))"
    )
    questions = []
    for name in ("gsm8k_test100", "humaneval"):
        lines = (args.prompts / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[: args.count // 2]
        questions += [json.loads(line)["turns"][0] for line in lines]
    done = subprocess.run(
        [sys.executable, "-c", code, str(args.target)], input=json.dumps(questions), env=env,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    ids: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return ids


if __name__ == "__main__":
    main()
