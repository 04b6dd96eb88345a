"""DDTREE in SGLang on one GPU: many servers side by side, texts against plain decoding, draws, pool, then speeds.

    python benchmarks/sglang_h200/run.py --kit DIR --target DIR --drafter DIR --prompts DIR --out DIR [--only NAME ...]

Servers start together, since most of a start is imports; speeds are taken one server at a time, in turn, the others
ended or idle. What fails prints its traceback and the rest goes on; after ``--seconds`` all is ended and written down.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from exact_draws import CASES, check_draws, joint_law
from near_ties import MOST_STEPS, STEP, partings, verdict
from pool_checks import check_abort, check_prefix, check_small_pool
from servers import Answer, Server, figures
from ways import EXACT_MOST, WAYS, arguments

from kit import environment, install_kit, plugin_path, put_over

IN_TURN = ("ar", "dflash", "tree32", "tree64", "tree16")
CONCURRENCIES = (1, 4, 16)


class Benchmark:
    """One run: its servers, what it found, and its time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begun = args, time.time()
        self.results: dict[str, Any] = {"ways": {}, "speeds": {}, "checks": {}, "budgets": {}}
        self.servers: dict[str, Server] = {}
        self.texts: dict[str, list[Answer]] = {}
        self.ending = threading.Lock()

    def left(self) -> float:
        return float(self.args.seconds - (time.time() - self.begun))

    def say(self, *words: Any) -> None:
        print(f"[{time.time() - self.begun:5.0f}]", *words, flush=True)

    # -- servers ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        site = self.args.site.resolve()
        install_kit(self.args.kit, site)
        if self.args.overlay:
            put_over(site, self.args.overlay)
        self.env = environment(site, plugin_path(site.with_name("plugin")))
        self.logs = site.with_name("logs")
        self.logs.mkdir(exist_ok=True)
        self.say("kit ready")
        for index, name in enumerate(self.args.only):
            self.start_one(name, WAYS[name], 30000 + 200 * index)

    def start_one(self, name: str, way: Any, port: int) -> Server:
        line = arguments(way, str(self.args.target), str(self.args.drafter))
        server = self.servers[name] = Server(name, line, port, way.environment)
        server.start(self.env, self.logs)
        return server

    def wait(self, server: Server) -> bool:
        begun = time.time()
        while time.time() - begun < self.args.start_seconds and self.left() > 0:
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

    def guarded(self, name: str, work: Any) -> Any:
        try:
            return work()
        except Exception as error:
            server = self.servers.get(name)
            self.say(f"=== {name}: {error!r}")
            traceback.print_exc(limit=-3)
            if server is not None:
                print(server.tail(70), flush=True)
            return None

    # -- checks ----------------------------------------------------------------------------------------------------

    def prepare(self, name: str) -> None:
        """Wait for a server and take its texts: alone or ragged four at a time, cold, then with warm prefixes."""
        server, way = self.servers[name], WAYS[name]
        if not self.wait(server):
            return
        server.generate(self.prompts[0], timeout=100)
        server.flush()
        cold, cold_s = server.answer_all(self.prompts, 1 if way.alone else 4)
        row = self.results["ways"].setdefault(name, {"ready_s": server.ready_s})
        row["cold"] = figures(cold, cold_s)
        row["cuda_graph"] = b"cuda graph: True" in server.log.read_bytes() if server.log else None
        self.texts[name] = cold
        self.say(f"{name}: {json.dumps(row)}")

    def compare(self, name: str) -> None:
        way = WAYS[name]
        if not way.against or name not in self.texts or way.against not in self.texts:
            return
        plain = way.against if way.against.startswith("ar") else "ar"
        places, parted = partings(self.servers[plain], self.prompts, self.texts[name], self.texts[way.against])
        exact = way.against == "ar-exact"
        row = verdict(places, parted, EXACT_MOST if exact else MOST_STEPS * STEP)
        self.results["ways"][name]["texts"] = {"against": way.against, "first_differences": places, **row}
        shown = {key: row[key] for key in ("equal", "near_ties", "faults", "largest_gap", "gaps_in_steps")}
        self.say(f"{name} against {way.against}: {json.dumps(shown)}")

    def draws(self, prompt: list[int]) -> None:
        plain, tree = self.servers["ar-exact"], self.servers["tree32-exact"]
        laws = {name: joint_law(plain, prompt, case, self.args.draws, 3) for name, case in CASES.items()}
        with ThreadPoolExecutor(2) as pool:
            told = list(pool.map(lambda s: check_draws(s, laws, prompt, self.args.draws), (plain, tree)))
        for server, found in zip((plain, tree), told, strict=True):
            self.results["ways"][server.name]["draws"] = found
            self.say(f"{server.name} draws: {json.dumps(found)}")

    def check(self) -> None:
        """All that is not speed, side by side."""
        if "ar" in self.texts:
            answers = self.texts["ar"]
            self.results["checks"]["ends_in_texts"] = sum(len(a.token_ids) < 256 for a in answers)
        work: list[tuple[str, Any]] = [(name, lambda n=name: self.compare(n)) for name in self.args.only]
        if {"ar-exact", "tree32-exact"} <= set(self.texts):
            work.append(("tree32-exact", lambda: self.draws(self.prompts[1])))
        for name, check in (("tree32", check_prefix), ("small-pool", check_small_pool)):
            if name in self.texts:
                work.append((name, lambda n=name, c=check: self.note(c.__name__, c(self.servers[n], self.prompts))))
        with ThreadPoolExecutor(24) as pool:
            list(pool.map(lambda job: self.guarded(*job), work))
        if "tree32" in self.texts:
            self.guarded("tree32", lambda: self.note("check_abort", check_abort(self.servers["tree32"], self.prompts)))
            told = json.loads(self.servers["tree32"].get("/server_info"))
            self.results["checks"]["server_info"] = {k: v for k, v in told.items() if "ddtree" in k.lower()} | {
                key: told.get(key) for key in ("speculative_algorithm", "speculative_num_draft_tokens", "version")
            }
            lines = self.servers["tree32"].get("/metrics").decode().splitlines()
            spec = [
                line.split("{")[0] + " " + line.rsplit(" ", 1)[1] for line in lines if line.startswith("sglang:spec")
            ]
            self.results["checks"]["metrics"] = spec
            self.say(self.results["checks"]["server_info"], spec)

    def note(self, name: str, found: Any) -> None:
        self.results["checks"][name] = found
        self.say(f"{name}: {json.dumps(found)}")

    # -- speeds ----------------------------------------------------------------------------------------------------

    def speeds(self, names: list[str], repeats: int) -> None:
        """In turn, so that a slow minute of the machine meets all of them."""
        for _ in range(repeats):
            for concurrency in CONCURRENCIES:
                batch = {1: self.prompts[::2], 4: self.prompts, 16: self.prompts * 2}[concurrency]
                for name in names:
                    if self.left() < 4:
                        return
                    taken = self.guarded(name, lambda n=name, b=batch, c=concurrency: self.take(n, b, c))
                    if taken:
                        rows = self.results["speeds"].setdefault(name, {})
                        rows.setdefault(f"c{concurrency}", []).append(taken)

    def take(self, name: str, batch: list[list[int]], concurrency: int) -> dict[str, float]:
        return figures(*self.servers[name].answer_all(batch, concurrency))

    def table(self) -> None:
        self.say("median of the repeats: tok/s of a request at c=1, of all together at c=4 and 16; tau")
        for name, rows in self.results["speeds"].items():
            cells = []
            for c in CONCURRENCIES:
                runs = rows.get(f"c{c}", [])
                key = "request_tok_s" if c == 1 else "total_tok_s"
                if runs:
                    cells.append(
                        f"c{c} {median(run[key] for run in runs):8.1f} (tau {median(run['tau'] for run in runs):.2f})"
                    )
            print(f"  {name:14}" + "  ".join(cells), flush=True)

    def end(self) -> None:
        with self.ending:
            for server in self.servers.values():
                server.stop()
            (self.args.out / "results.json").write_text(json.dumps(self.results, indent=1))
            with tarfile.open(self.args.out / "logs.tar.gz", "w:gz") as archive:
                archive.add(self.logs, "logs")
            self.say("all ended")

    def out_of_time(self) -> None:
        self.say("out of time")
        self.end()
        os._exit(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("kit", "target", "drafter", "prompts", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--site", type=Path, default=Path("site"), help="where the kit is unpacked to")
    parser.add_argument("--overlay", type=Path, help="wheel of another SGLang, put over the kit's")
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS), help="servers to start")
    parser.add_argument("--count", type=int, default=20, help="prompts, half of them maths, half code")
    parser.add_argument("--draws", type=int, default=480, help="draws a case at temperature above 0")
    parser.add_argument("--repeats", type=int, default=3, help="speeds at most so often")
    parser.add_argument("--seconds", type=float, default=330, help="after that all is ended")
    parser.add_argument("--start-seconds", type=float, default=170, help="to wait for servers at most")
    parser.add_argument("--auto", action="store_true", help="at the end, a server whose budget is auto")
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
        with ThreadPoolExecutor(32) as pool:
            waiting: list[Future[Any]] = [
                pool.submit(run.guarded, name, lambda n=name: run.prepare(n)) for name in args.only
            ]
            for job in waiting:
                job.result()
        run.check()
        timed = [name for name in IN_TURN if name in run.texts]
        for name, server in run.servers.items():
            if name not in timed:
                server.stop()
        run.speeds(timed, 1)
        if args.auto and run.left() > 50:
            from auto_server import start_auto

            run.guarded("auto", lambda: start_auto(run, timed))
        run.speeds([*timed, *(["auto"] if run.results["budgets"].get("auto_ready") else [])], args.repeats - 1)
        run.table()
    except Exception:
        traceback.print_exc()
    finally:
        guard.cancel()
        run.end()


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
