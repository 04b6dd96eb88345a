r"""What the server costs, with a simulated GPU: the real server and scheduler, and rounds that only take time.

    python benchmarks/server_simulated.py --target DIR --out FILE
    python benchmarks/server_simulated.py --target DIR --out FILE --before OTHER/src     # two sources, interleaved

A round of n sequences takes `--round-ms` (one sequence, then 64, in between by a straight line) of a device that does
one thing after the other, during which the engine's thread sleeps without the GIL, as it does in a CUDA event's
`synchronize`; each launch costs the host `--launch-us` of work with the GIL. Every sequence gets about 5 tokens of an
English text a round, so that its words go through the real tokenizer (`--target` is only read for that). All else is
real: `Sequence`, `Seating`, `Scheduler`, sockets, HTTP. The acceptance is simulated; tokens a second say nothing about
a model.

Pieces, each a list of rows with all their repeats:

streams   closed loop of streamed chats by concurrency: tokens a second, time to the first token, CPU time of the
          server's event loop by request (from whole answers) and by chunk of text (what streams need more), that of
          the engine's thread by round of a sequence, and what share of the time each was busy. Where the client's is
          near 1, the client is what is measured. Beside it a bare engine that gets the same.
bound     the same from 32 streams on, with launches of `--bound-us`: an engine that is bound by its host and holds the
          GIL for most of the time.
overhead  batch 1: the same answer from a bare engine, whole over HTTP, and streamed, one after the other.

CPU times are the kernel's (`/proc/PID/task/*/schedstat`, Linux only), so that other work on the machine moves them
less than it moves the clock.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ending import end
from stream_crowd import Crowd, Reply
from thread_time import thread_cpu_s

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
PIECES = ("overhead", "streams", "bound")
BOUND_FROM = 32
# Tokens of a round, over and over; 5 in the mean.
LENGTHS = (5, 3, 7, 4, 6, 1, 9, 5)
TEXT = (
    "The first thing to know about a long river is that nobody has seen all of it at once. It begins as water that "
    "drips from moss, gathers in a bed of stones, and takes the name of a village; 200 km later it carries ships. "
    'People who live beside it know three or four of its moods, "high", "low" and "angry", and plant for them.\n'
    "- In spring it brings mud, which is good for onions.\n- In autumn it brings fog, which is good for nothing.\n\n"
)
PROMPT = "Tell me of rivers, and do not stop before the sea."


@dataclass(frozen=True)
class Costs:
    """What the simulated device and its launches take.

    Attributes:
        one_ms, many_ms: a round of 1 and of 64 sequences.
        prefill_ms: a chunk of prompts, whatever its size.
        launch_us: host work of a launch, with the GIL.
    """

    one_ms: float
    many_ms: float
    prefill_ms: float
    launch_us: float

    def round_s(self, batch: int) -> float:
        return 1e-3 * (self.one_ms + (self.many_ms - self.one_ms) * (batch - 1) / 63)


def simulated_engine(folder: Path, max_batch: int, costs: Costs) -> Any:
    """An engine of a tiny random target whose rounds take `costs` and bring `TEXT`."""
    import numpy as np

    from ddtree import Engine
    from ddtree.engine import scheduler
    from ddtree.engine.flight import Landed
    from ddtree.engine.runner import EagerRunner

    engine = Engine.load(
        folder, device="cpu", dtype="float32", max_model_len=1024, max_batch=max_batch, memory_fraction=0.05
    )
    text = engine.tokenizer.encode(TEXT)
    text, none = text * 3, np.empty(0, np.int64)
    free_at = [0.0]
    given: dict[int, int] = {}  # by slot: rounds, which pick the tokens

    class SimulatedFlight:
        def __init__(self, slots: list[int], device_s: float, is_first: bool) -> None:
            self.launched = time.perf_counter()
            worked = time.thread_time() + 1e-6 * costs.launch_us
            while time.thread_time() < worked:
                pass
            self._ends = free_at[0] = max(free_at[0], time.perf_counter()) + device_s
            self._slots, self._is_first = slots, is_first

        def land(self) -> list[Landed]:
            if (left := self._ends - time.perf_counter()) > 0:
                time.sleep(left)
            landed = []
            for slot in self._slots:
                n = given[slot] = 0 if self._is_first else given[slot] + 1
                length = 1 if self._is_first else LENGTHS[(n + slot) % len(LENGTHS)]
                at = (5 * n + slot) % (len(text) // 3)
                landed.append(Landed(text[at : at + length], length - 1, none))
            return landed

        def device_ms(self) -> float | None:
            return None

    @dataclass(frozen=True)
    class SimulatedLaunch:
        flight: SimulatedFlight

    class SimulatedRunner(EagerRunner):
        overlaps = fills_up = True

        def launch(self, slots: list[int], shape: Any, flags: Any, context_bound: int, is_timed: bool) -> Any:
            return SimulatedLaunch(SimulatedFlight(slots, costs.round_s(len(slots)), is_first=False))

        def prefill(self, slots: list[int], chunks: list[list[int]], kind: Any, context_bound: int, *_: Any) -> Any:
            return slots

        def prefill_rows(self, rows: int) -> int:
            return max(32, 1 << (rows - 1).bit_length())

    def first_tokens(slots: list[int], *_: Any) -> SimulatedFlight:
        return SimulatedFlight(slots, 1e-3 * costs.prefill_ms, is_first=True)

    scheduler.Flight = first_tokens  # the one flight that the scheduler makes itself
    engine.warm_up_batches = lambda tell: None
    engine._runner = engine._scheduler._runner = SimulatedRunner(engine.state, engine.target, None, "simulated")
    engine._seating._overshoot = 1
    return engine


def tiny_target(target: Path, folder: Path) -> Path:
    """A random target of one narrow layer with the tokenizer of ``target``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    config = AutoConfig.for_model(
        "llama", vocab_size=vocab_size, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (target / name).exists():
            shutil.copy(target / name, folder / name)
    return folder


def serve(folder: Path, max_batch: int, costs: Costs) -> None:
    """The server's process: tells its address and its engine's thread on the standard error output."""
    from ddtree.server.run import serve as run
    from ddtree.server.settings import ServerSettings

    def load(tell: Callable[[str, float], None]) -> Any:
        print(f"engine thread {threading.get_native_id()}", file=sys.stderr, flush=True)
        return simulated_engine(folder, max_batch, costs)

    settings = ServerSettings(model_name="simulated", port=0, max_queue=4 * max_batch)
    run(settings, load, {"engine": {}}, lambda line: print(line, file=sys.stderr, flush=True))


@dataclass
class Served:
    """A server's process, and the CPU time of its two threads."""

    url: str
    pid: int
    engine_thread: int

    def cpu_s(self) -> tuple[float, float, float]:
        """CPU seconds so far of the event loop, of the engine's thread, and of the whole process."""
        spent = thread_cpu_s(self.pid)
        return spent[self.pid], spent[self.engine_thread], sum(spent.values())


@dataclass(frozen=True)
class Spent:
    """Seconds of a closed loop: of the clock, and CPU of the server's threads and of the client."""

    wall_s: float
    loop_s: float
    engine_s: float
    others_s: float
    client_s: float


@contextlib.contextmanager
def server(source: Path, folder: Path, max_batch: int, costs: Costs) -> Iterator[Served]:
    """A server of the code in ``source``, in its own process."""
    command = [sys.executable, __file__, "--serve", folder, "--max-batch", max_batch, *cost_flags(costs)]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True, env=environment)
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        for line in iter(process.stderr.readline, ""):  # type: ignore[union-attr]
            lines.append(line)
            if line.strip() == "ready":
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        if not ready.wait(120) or process.poll() is not None:
            sys.exit("the server did not come up: " + "".join(lines[-5:]))
        told = "".join(lines)
        url, thread = re.search(r"listening on (\S+)", told), re.search(r"engine thread (\d+)", told)
        assert url and thread
        yield Served(url[1], process.pid, int(thread[1]))
    finally:
        end(process, 40)


def cost_flags(costs: Costs) -> list[object]:
    rounds = f"{costs.one_ms},{costs.many_ms}"
    return ["--round-ms", rounds, "--prefill-ms", costs.prefill_ms, "--launch-us", costs.launch_us]


def chat(max_tokens: int, stream: bool) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": max_tokens}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


def closed_loop(served: Served, concurrency: int, stream: bool, args: argparse.Namespace) -> tuple[list[Reply], Spent]:
    """So many clients, each asking again when its answer is whole."""
    bodies = [chat(args.max_tokens, stream)] * max(24, args.requests_per_client * concurrency)
    with Crowd(served.url, concurrency) as crowd:
        before, client_before, began = served.cpu_s(), time.thread_time(), time.perf_counter()
        replies = crowd.ask(bodies)
        wall = time.perf_counter() - began
        after, client_after = served.cpu_s(), time.thread_time()
    loop_s, engine_s, total_s = (b - a for a, b in zip(before, after, strict=True))
    return replies, Spent(wall, loop_s, engine_s, total_s - loop_s - engine_s, client_after - client_before)


def streams_row(served: Served, concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    """One closed loop of streams, and before it one of whole answers, to tell chunks from requests."""
    wholes, alone = closed_loop(served, concurrency, False, args)
    if any(reply.status != 200 for reply in wholes):
        sys.exit("a whole answer failed")
    replies, spent = closed_loop(served, concurrency, True, args)
    tokens, chunks, rounds = (sum(each) for each in zip(*map(read, replies), strict=True))
    ttft = sorted(1e3 * (reply.first - reply.began) for reply in replies)
    request_s = alone.loop_s / len(wholes)
    return {
        "tok_s": round(tokens / spent.wall_s, 1), "whole_tok_s": round(tokens / alone.wall_s, 1),
        "ttft_ms_p50": quantile(ttft, 0.5), "ttft_ms_p99": quantile(ttft, 0.99), "chunks": chunks, "rounds": rounds,
        "loop_us_a_chunk": round(1e6 * (spent.loop_s - request_s * len(replies)) / chunks, 2),
        "loop_us_a_request": round(1e6 * request_s, 1),
        "engine_us_a_round": round(1e6 * spent.engine_s / rounds, 2),
        "others_us_a_round": round(1e6 * spent.others_s / rounds, 2),
        "loop_busy": round(spent.loop_s / spent.wall_s, 3), "engine_busy": round(spent.engine_s / spent.wall_s, 3),
        "client_busy": round(spent.client_s / spent.wall_s, 3),
    }  # fmt: skip


def read(reply: Reply) -> tuple[int, int, int]:
    """Tokens, chunks with text, and rounds of a streamed answer; ends where it is not what it should be."""
    if reply.status != 200 or not reply.body.endswith(b"data: [DONE]\n\n"):
        sys.exit(f"a stream failed: {reply.raw[:300]!r}")
    events = reply.events()
    texts = [choice["delta"].get("content") for event in events for choice in event["choices"]]
    last = events[-1]
    return last["usage"]["completion_tokens"], sum(bool(text) for text in texts), last["ddtree"]["rounds"]


def bare_row(engine: Any, concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    """The same closed loop without a server; texts are made once an answer is whole."""
    from ddtree import SamplingParams

    params = SamplingParams(max_new_tokens=args.max_tokens)
    left = max(24, args.requests_per_client * concurrency)
    prompt, tokens, running = [{"role": "user", "content": PROMPT}], 0, 0
    began, cpu = time.perf_counter(), time.thread_time()
    while left or running:
        while left and running < concurrency:
            engine.submit(prompt, params)
            left, running = left - 1, running + 1
        for sequence in engine.step():
            if sequence.finish_reason:
                tokens, running = tokens + len(sequence.completion().token_ids), running - 1
    wall = time.perf_counter() - began
    return {"tok_s": round(tokens / wall, 1), "engine_busy": round((time.thread_time() - cpu) / wall, 3)}


def overhead_rows(servers: dict[str, Served], engine: Any, args: argparse.Namespace) -> list[dict[str, float]]:
    """Milliseconds of an answer, by each way, in turn."""
    from ddtree import SamplingParams

    params, prompt = SamplingParams(max_new_tokens=args.max_tokens), [{"role": "user", "content": PROMPT}]

    def bare() -> float:
        began = time.perf_counter()
        (done,) = engine.generate([prompt], params)
        assert len(done.token_ids) == args.max_tokens
        return 1e3 * (time.perf_counter() - began)

    with contextlib.ExitStack() as stack:
        ways: dict[str, Callable[[], float]] = {"bare": bare}
        for name, served in servers.items():
            crowd = stack.enter_context(Crowd(served.url, 1))
            for way, stream in (("whole", False), ("streamed", True)):

                def one(crowd: Crowd = crowd, stream: bool = stream) -> float:
                    (reply,) = crowd.ask([chat(args.max_tokens, stream)])
                    assert reply.status == 200, reply.raw[:300]
                    return 1e3 * (reply.ended - reply.began)

                ways[f"{name} {way}"] = one
        for way in ways.values():
            way()
        rows = []
        for turn in range(args.answers):
            names = list(ways) if turn % 2 else list(ways)[::-1]
            rows.append({name: round(ways[name](), 3) for name in names})
        return rows


def quantile(ordered: list[float], share: float) -> float:
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2)


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}


def streams(
    sources: dict[str, Path], folder: Path, costs: Costs, concurrencies: list[int], args: argparse.Namespace
) -> dict[str, Any]:
    """By concurrency and source, the sources in turn, and the bare engine."""
    most = max(concurrencies)
    engine = simulated_engine(folder, most, costs)
    seen: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(server(path, folder, most, costs)) for name, path in sources.items()}
        for served in servers.values():
            streams_row(served, 4, args)
        bare_row(engine, 4, args)
        for repeat in range(args.repeats):
            for concurrency in concurrencies:
                each = seen.setdefault(str(concurrency), {})
                for name in list(servers) if repeat % 2 else list(servers)[::-1]:
                    each.setdefault(name, []).append(streams_row(servers[name], concurrency, args))
                each.setdefault("bare", []).append(bare_row(engine, concurrency, args))
    for concurrency, each in seen.items():
        for name, rows in each.items():
            print(concurrency, name, medians(rows), flush=True)
    return {
        concurrency: {name: {"median": medians(rows), "rows": rows} for name, rows in each.items()}
        for concurrency, each in seen.items()
    }


def overhead(sources: dict[str, Path], folder: Path, costs: Costs, args: argparse.Namespace) -> dict[str, Any]:
    """Of every way over the bare engine."""
    engine = simulated_engine(folder, 1, costs)
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(server(path, folder, 1, costs)) for name, path in sources.items()}
        rows = overhead_rows(servers, engine, args)
    table = {}
    for name in (name for name in rows[0] if name != "bare"):
        ratios = sorted(row[name] / row["bare"] - 1 for row in rows)
        table[name] = {
            "overhead": round(statistics.median(ratios), 4),
            "quartiles": [round(ratios[int(q * len(ratios))], 4) for q in (0.25, 0.75)],
        }
    print(json.dumps(table), medians(rows), flush=True)
    return {"table": table, "median_ms": medians(rows), "rows": rows}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All pieces."""
    sources = ({"before": args.before.resolve()} if args.before else {}) | {"now": ROOT / "src"}
    costs = costs_of(args)
    bound = [concurrency for concurrency in args.concurrency if concurrency >= BOUND_FROM]
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_target(args.target, Path(scratch))
        pieces: dict[str, Callable[[], dict[str, Any]]] = {
            "overhead": lambda: overhead(sources, folder, costs, args),
            "streams": lambda: streams(sources, folder, costs, args.concurrency, args),
            "bound": lambda: streams(sources, folder, replace(costs, launch_us=args.bound_us), bound, args),
        }
        return {name: piece() for name, piece in pieces.items() if name in args.pieces}


def costs_of(args: argparse.Namespace) -> Costs:
    return Costs(*args.round_ms, args.prefill_ms, args.launch_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="folder of a model with a chat template")
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument("--before", type=Path, help="another source folder, measured in turn with this one")
    parser.add_argument("--pieces", type=lambda text: text.split(","), default=list(PIECES))
    parser.add_argument("--concurrency", type=lambda t: [int(n) for n in t.split(",")], default=[1, 4, 16, 32, 64])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--requests-per-client", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--answers", type=int, default=30)
    parser.add_argument("--round-ms", type=lambda t: [float(n) for n in t.split(",")], default=[0.65, 2.5])
    parser.add_argument("--prefill-ms", type=float, default=1.0)
    parser.add_argument("--launch-us", type=float, default=60.0)
    parser.add_argument("--bound-us", type=float, default=2500.0)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--max-batch", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if len(args.round_ms) != 2:
        parser.error("--round-ms: two numbers, for 1 sequence and for 64")
    if args.serve:
        serve(args.serve, args.max_batch, costs_of(args))
        return
    if not (args.target and args.out):
        parser.error("give --target and --out")
    if unknown := set(args.pieces) - set(PIECES):
        parser.error(f"no piece {', '.join(sorted(unknown))}: choose of {', '.join(PIECES)}")
    if "bound" in args.pieces and max(args.concurrency) < BOUND_FROM:
        parser.error(f"the piece bound wants a --concurrency of {BOUND_FROM} or more")
    if not Path("/proc/self/schedstat").exists():
        sys.exit("this system does not tell the CPU time of threads: run it on Linux")
    sys.path.insert(0, str(ROOT / "src"))
    import ddtree.openmp  # noqa: F401 - before torch

    began = time.time()
    result = {
        "simulated": "rounds take time and bring a fixed text; nothing here is a model's speed",
        "options": {k: v for k, v in vars(args).items() if not isinstance(v, Path) and k not in ("serve", "max_batch")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **measure(args),
        "seconds": round(time.time() - began, 1),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    part = args.out.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(args.out)
    print(f"{result['seconds']} s, written to {args.out.name}", flush=True)


if __name__ == "__main__":
    main()
