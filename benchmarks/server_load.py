r"""A live `ddtree serve` under load: throughput, time to first token and tau by concurrency, and its own cost.

    python benchmarks/server_load.py --target DIR --drafter DIR --prompts DIR --device cuda \
        --concurrency 1,2,4,8,16,32,64 --out DIR

Two pieces, each written to its own JSON file as soon as it is measured:

load      closed loop: so many clients, each asking again when its answer is whole, over HTTP streams. Every mode at
          every concurrency in turn, with the same prompts; the order turns round with each repeat.
overhead  batch 1: the same prompt through the server and through a bare engine in this process, one after the other,
          in alternating order. The ratio of wall times is the server's overhead.

The client keeps bytes as they come and reads them when all is over (`stream_crowd.py`): one that reads every event at
once is busier than the server from some thousand events a second on, and measures itself. `client_busy` says what share
of its time it worked, `loop_busy` and `engine_busy` what share the server's event loop and its engine's thread did; the
two share one interpreter.

Prompts are `*.jsonl` files with `{"turns": [text, ...]}` lines, of which the first turn is asked. The prefix cache is
off, as the same prompts are asked again and again. On a CPU only the ratios within one run mean anything.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from ending import end
from stream_crowd import Crowd, Reply
from thread_time import thread_cpu_s

ROOT = Path(__file__).resolve().parents[1]
MODEL = "measured"
READY_WITHIN_S = 540.0

# Modes by the names of the tables; the field `ddtree` of a request.
MODES: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "chain": {"mode": "chain"},
    "auto": {"mode": "tree", "budget": "auto"},
    "tree8": {"mode": "tree", "budget": 8},
    "tree16": {"mode": "tree", "budget": 16},
    "tree32": {"mode": "tree", "budget": 32},
    "tree64": {"mode": "tree", "budget": 64},
}


@dataclass
class Answer:
    """One answer as a client sees it.

    Attributes:
        ttft_ms: from the request to the first piece of text.
        wall_ms: from the request to the end of the stream.
        tokens: as `usage` counts them.
        rounds: rounds after the first token.
        text: the whole of it.
    """

    ttft_ms: float
    wall_ms: float
    tokens: int
    rounds: int
    text: str
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Point:
    """One mode at one concurrency, over all repeats."""

    mode: str
    concurrency: int
    requests: int
    tokens: int
    tok_s: float
    tok_s_per_client: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tau: float | None
    repeats_tok_s: list[float]
    failed: int
    client_busy: float
    loop_busy: float
    engine_busy: float
    notes: list[str]


def read_prompts(folder: Path, count: int) -> list[str]:
    """First turns, taking one of each file in turn."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        sys.exit(f"{folder} has no .jsonl files: give --prompts a folder of prompts")
    rows = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line] for file in files]
    found = [
        each[place]["turns"][0]
        for place in range(max(map(len, rows)))
        for each in rows
        if place < len(each) and each[place].get("turns")
    ]
    return found[:count]


@contextlib.contextmanager
def server(args: argparse.Namespace, max_batch: int) -> Iterator[tuple[str, int]]:
    """`ddtree serve` as its own process; gives its address and its number once it is ready."""
    command = [
        sys.executable, "-m", "ddtree", "serve", "--model", args.target, "--draft", args.drafter, "--port", "0",
        "--device", args.device, "--dtype", args.dtype, "--max-batch", max_batch, "--max-queue", 4 * max_batch,
        "--served-model-name", MODEL, "--max-model-len", args.max_model_len, "--no-prefix-cache",
        "--memory-fraction", args.memory_fraction,
    ]  # fmt: skip
    command += ["--threads", args.threads] if args.threads else []
    process = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")), daemon=True)
    reader.start()
    began, url, stage = time.monotonic(), None, ""
    try:
        while True:
            if process.poll() is not None:
                sys.exit("the server ended: " + " ".join(line.strip() for line in lines[-3:]))
            if time.monotonic() - began > READY_WITHIN_S:
                sys.exit(f"the server was not ready after {READY_WITHIN_S:g} s: {stage}")
            if url is None:
                found = re.search(r"listening on (http://\S+)", "".join(lines))
                url = found[1] if found else None
            else:
                with contextlib.suppress(httpx.TransportError):  # it is ending: told above
                    ready = httpx.get(f"{url}/ready")
                    if ready.status_code == 200:
                        break
                    stage = ready.json()["stage"]
            time.sleep(0.1)
        print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
        yield url, process.pid
    finally:
        end(process, 60)


def request(prompt: str, mode: str, max_tokens: int, stream: bool = True) -> dict[str, Any]:
    """A chat."""
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": max_tokens,
        "ddtree": MODES[mode],
    }  # fmt: skip
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


def read(reply: Reply) -> Answer | None:
    """An answer, streamed or whole; None where it failed."""
    if reply.status != 200:
        print(f"{reply.status}: {reply.body[:200].decode('utf-8', 'replace')}", flush=True)
        return None
    events = reply.events() or [json.loads(reply.body)]
    last = events[-1]
    if "error" in last:
        print(last["error"]["message"], flush=True)
        return None
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join((choice.get("delta") or choice.get("message", {})).get("content") or "" for choice in choices)
    return Answer(
        ttft_ms=1e3 * (reply.first - reply.began), wall_ms=1e3 * (reply.ended - reply.began),
        tokens=last["usage"]["completion_tokens"], rounds=last["ddtree"]["rounds"], text=text,
        notes=last["ddtree"]["notes"],
    )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One closed loop: its answers, its seconds, and the shares of them in which client and server worked."""

    answers: list[Answer | None]
    seconds: float
    client_busy: float
    loop_busy: float
    engine_busy: float


def crowd(served: tuple[str, int], prompts: list[str], mode: str, concurrency: int, args: argparse.Namespace) -> Part:
    """``concurrency`` clients over ``prompts``."""
    url, pid = served
    bodies = [request(prompt, mode, args.max_tokens) for prompt in prompts]
    with Crowd(url, concurrency) as clients:
        before, worked, began = thread_cpu_s(pid), time.thread_time(), time.perf_counter()
        replies = clients.ask(bodies)
        seconds, worked, after = time.perf_counter() - began, time.thread_time() - worked, thread_cpu_s(pid)
    spent = {thread: cpu_s - before.get(thread, 0.0) for thread, cpu_s in after.items()}
    loop_s = spent.pop(pid)
    engine_s = max(spent.values())  # of the others the engine's is the only one with much to do
    busy = [round(each / seconds, 3) for each in (worked, loop_s, engine_s)]
    return Part([read(reply) for reply in replies], seconds, *busy)


def load(args: argparse.Namespace) -> dict[str, Any]:
    """Every mode at every concurrency."""
    prompts = read_prompts(args.prompts, args.count)
    seen: dict[tuple[str, int], list[Part]] = {}
    with server(args, max(args.concurrency)) as served:
        for mode in args.modes:  # what is captured or timed at first use is so before anything counts
            for concurrency in args.concurrency:
                crowd(served, prompts[:concurrency], mode, concurrency, args)
        for repeat in range(args.repeats):
            for concurrency in args.concurrency:
                count = max(args.least_requests, args.requests_per_client * concurrency)
                asked = [prompts[i % len(prompts)] for i in range(count)]
                for mode in args.modes if repeat % 2 else args.modes[::-1]:
                    part = crowd(served, asked, mode, concurrency, args)
                    seen.setdefault((mode, concurrency), []).append(part)
        facts = httpx.get(f"{served[0]}/server_info").json()
    points = [
        point(mode, concurrency, parts) for (mode, concurrency), parts in sorted(seen.items(), key=lambda e: e[0][1])
    ]
    print(f"{'mode':8}{'clients':>8}{'tok/s':>10}{'x ar':>7}{'TTFT p50':>10}{'p99 ms':>10}{'tau':>7}", end="")
    print("   busy: client  loop  engine")
    for p in points:
        plain = next((q.tok_s for q in points if q.mode == "ar" and q.concurrency == p.concurrency), None)
        ratio = f"{p.tok_s / plain:7.2f}" if plain else f"{'-':>7}"
        tau = f"{p.tau:7.2f}" if p.tau else f"{'-':>7}"
        print(
            f"{p.mode:8}{p.concurrency:8}{p.tok_s:10.1f}{ratio}{p.ttft_ms_p50:10.1f}{p.ttft_ms_p99:10.1f}{tau}{p.client_busy:10.2f}{p.loop_busy:6.2f}{p.engine_busy:6.2f}"
        )
    return {"prompts": len(prompts), "points": [asdict(p) for p in points], "server": without_paths(facts)}


def point(mode: str, concurrency: int, parts: list[Part]) -> Point:
    answers = [answer for part in parts for answer in part.answers if answer is not None]
    speeds = [sum(a.tokens for a in part.answers if a is not None) / part.seconds for part in parts]
    rounds = sum(a.rounds for a in answers)
    ttft = sorted(a.ttft_ms for a in answers)
    return Point(
        mode=mode, concurrency=concurrency, requests=len(answers), tokens=sum(a.tokens for a in answers),
        tok_s=round(statistics.median(speeds), 2),
        tok_s_per_client=round(statistics.median(speeds) / concurrency, 2),
        ttft_ms_p50=round(quantile(ttft, 0.5), 2), ttft_ms_p99=round(quantile(ttft, 0.99), 2),
        tau=round(sum(a.tokens - 1 for a in answers) / rounds, 3) if rounds else None,
        repeats_tok_s=[round(speed, 2) for speed in speeds],
        failed=sum(answer is None for part in parts for answer in part.answers),
        client_busy=statistics.median(part.client_busy for part in parts),
        loop_busy=statistics.median(part.loop_busy for part in parts),
        engine_busy=statistics.median(part.engine_busy for part in parts),
        notes=sorted({note for a in answers for note in a.notes}),
    )  # fmt: skip


def quantile(ordered: list[float], share: float) -> float:
    """The smallest value that is not below ``share`` of all; 0 of none."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """The server against a bare engine of the same settings, batch 1."""
    import ddtree.openmp  # noqa: F401 - before torch
    from ddtree import Engine, SamplingParams, Speculation

    prompts = read_prompts(args.prompts, args.overhead_prompts)
    rows: dict[str, list[dict[str, Any]]] = {mode: [] for mode in args.modes}
    with server(args, 1) as (url, _), Crowd(url, 1) as client:
        engine = Engine.load(
            args.target, args.drafter, device=args.device, dtype=args.dtype, max_batch=1, threads=args.threads,
            max_model_len=args.max_model_len, memory_fraction=args.memory_fraction,
        )  # fmt: skip
        params = SamplingParams(max_new_tokens=args.max_tokens)

        def bare(prompt: str, mode: str) -> tuple[float, int, int]:
            began = time.perf_counter()
            chat = [{"role": "user", "content": prompt}]
            (done,) = engine.generate([chat], params, speculation=Speculation(**MODES[mode]))
            return 1e3 * (time.perf_counter() - began), len(done.token_ids), done.stats.rounds

        def over(client: Crowd, stream: bool) -> Callable[[str, str], tuple[float, int, int]]:
            def way(prompt: str, mode: str) -> tuple[float, int, int]:
                answer = read(client.ask([request(prompt, mode, args.max_tokens, stream)])[0])
                assert answer is not None
                return answer.wall_ms, answer.tokens, answer.rounds

            return way

        ways = {"bare": bare, "whole": over(client, False), "streamed": over(client, True)}
        for mode in args.modes:
            for way in ways.values():
                way(prompts[0], mode)
        for turn, prompt in enumerate(prompts * args.repeats):
            for mode in args.modes:
                order = list(ways) if turn % 2 else list(ways)[::-1]
                told = {name: ways[name](prompt, mode) for name in order}
                rows[mode].append({
                    name: {"wall_ms": round(ms, 3), "tokens": tokens, "rounds": rounds}
                    for name, (ms, tokens, rounds) in told.items()
                })  # fmt: skip
    table = []
    for mode, each in rows.items():

        def per_token(row: dict[str, Any], way: str) -> float:
            return row[way]["wall_ms"] / row[way]["tokens"]

        line = {
            "mode": mode,
            "answers": len(each),
            "bare_ms": statistics.median(row["bare"]["wall_ms"] for row in each),
        }
        for way in ("whole", "streamed"):
            ratios = sorted(per_token(row, way) / per_token(row, "bare") for row in each)
            line[f"{way}_overhead"] = round(statistics.median(ratios) - 1, 4)
            line[f"{way}_overhead_quartiles"] = [round(quantile(ratios, q) - 1, 4) for q in (0.25, 0.75)]
        line["same_token_counts"] = sum(len({row[way]["tokens"] for way in ways}) == 1 for row in each)
        table.append(line)
        print(line, flush=True)
    return {"table": table, "rows": rows}


def without_paths(facts: dict[str, Any]) -> dict[str, Any]:
    """The server's facts, without folders of the machine that it ran on."""
    for group in (facts["requested"]["engine"], facts["effective"]["engine"]):
        for name in ("model", "draft"):
            group.pop(name, None)
    return facts


def commit() -> str | None:
    told = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return told.stdout.strip() if told.returncode == 0 else None


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(MODES):
        raise argparse.ArgumentTypeError(f"no mode {', '.join(sorted(unknown))}: choose of {', '.join(MODES)}")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="folder of .jsonl files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--pieces", default="load,overhead", help="load, overhead, or both")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--modes", type=names, default=["ar", "chain", "auto"], help=", ".join(MODES))
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--count", type=int, default=40, help="different prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--memory-fraction", type=float, default=0.3, help="server and bare engine share the device")
    parser.add_argument("--requests-per-client", type=int, default=2)
    parser.add_argument("--least-requests", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--overhead-prompts", type=int, default=10)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    pieces = args.pieces.split(",")
    if unknown := set(pieces) - {"load", "overhead"}:
        parser.error(f"no piece {', '.join(unknown)}")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.insert(0, str(ROOT / "src"))
    args.out.mkdir(parents=True, exist_ok=True)
    for piece in pieces:
        began = time.time()
        result = {
            "command": f"python benchmarks/server_load.py --pieces {piece}",
            "options": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
            "commit": commit(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            **{"load": load, "overhead": overhead}[piece](args),
            "seconds": round(time.time() - began, 1),
        }
        file = args.out / f"server_{piece}.json"
        part = file.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(file)
        print(f"{piece}: {result['seconds']} s, written to {file.name}", flush=True)


if __name__ == "__main__":
    main()
