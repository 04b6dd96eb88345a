"""What a client costs: the time that it adds to TTFT and the CPU that it takes, clients in turns on one server.

    python benchmarks/bench_client_cost.py --runs 15 --out benchmarks/results/bench_client_cost_cpu.json
    python benchmarks/bench_client_cost.py --before OTHER_CHECKOUT/src ...

The server times its own first text and keeps rounds as an engine does: every ``--round-ms`` each running request gets
an event, and a new one joins the first round that begins ``--first-ms`` after it came. What a client reads beyond the
server's own time is the client's. `raw` reads a socket and looks for the text; `peer` reads as SGLang's bench_serving
does, with aiohttp and a connection for each request; `before` is ``ddtree bench`` of another checkout. Each runs in a
process of its own and is warm. CPU is that of the client's process while requests run; an event's and a request's share
come from answers of ``--events`` and of two. ``phase`` shows what a pause between an answer and the next request does
to TTFT, with everything else the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

from ddtree.bench.plan import Load, Matrix
from ddtree.bench.provenance import PACKAGES, commit, host, versions
from ddtree.bench.result_folder import read_requests
from ddtree.bench.run import RunOptions, Watcher, run_bench
from ddtree.bench.workload import read_workload

TEXT, TOKENS, WORDS = " some words of it", 6, "word " * 100
BODY = {"model": "m", "messages": [{"role": "user", "content": WORDS}], "stream": True}
BODY |= {"temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}


def chunk(content: dict[str, Any] | str) -> bytes:
    text = content if isinstance(content, str) else json.dumps({"id": "x" * 24, "model": "m"} | content)
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def choice(delta: dict[str, str], reason: str | None = None) -> bytes:
    return chunk({"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]})


class Server(asyncio.Protocol):
    """Answers one request at a time on each connection."""

    running: ClassVar[list[Server]] = []
    own_ms: ClassVar[list[float]] = []
    event = choice({"content": TEXT})

    def connection_made(self, transport: Any) -> None:
        self.transport, self.received, self.is_gone, self.left, self.came = transport, b"", False, 0, 0.0
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_gone = True

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, rest = self.received.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = sum(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        if not found or len(rest) < length:
            return
        self.received, path = rest[length:], head.split(b" ")[1]
        if path == b"/v1/chat/completions":
            self.came = time.perf_counter()
            self.events = self.left = json.loads(rest)["max_tokens"] // TOKENS
            kind = b"content-type: text/event-stream\r\ntransfer-encoding: chunked"
            self.transport.write(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % kind + choice({"role": "assistant", "content": ""}))
            self.running.append(self)
            return
        told = {b"/v1/models": {"data": [{"id": "m"}]}, b"/own": self.own_ms}.get(path)
        body = json.dumps(told).encode()
        status = b"404 Not Found" if told is None else b"200 OK"
        self.transport.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        if path == b"/own":
            self.own_ms.clear()

    def step(self, first_s: float) -> None:
        """One round's event."""
        if self.left == self.events:
            if time.perf_counter() < self.came + first_s:
                return
            self.own_ms.append((time.perf_counter() - self.came) * 1e3)
        self.left -= 1
        if not self.left:
            self.running.remove(self)
        self.transport.write(self.event + (b"" if self.left else self.end()))

    def end(self) -> bytes:
        usage = {"prompt_tokens": 1, "completion_tokens": self.events * TOKENS}
        return choice({}, "length") + chunk({"choices": [], "usage": usage}) + chunk("[DONE]") + b"0\r\n\r\n"


def serve(port: int, first_s: float, round_s: float) -> None:
    async def rounds() -> None:
        await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port)
        due = time.perf_counter()
        while True:
            due = max(due + round_s, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            for each in list(Server.running):
                if each.is_gone:
                    Server.running.remove(each)
                else:
                    each.step(first_s)

    asyncio.run(rounds())


class Reader(asyncio.Protocol):
    """One kept connection, read without a library."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.received, self.first = transport, b"", 0.0

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.first and TEXT.encode() in self.received:
            self.first = time.perf_counter()
        if self.received.endswith(b"0\r\n\r\n"):
            self.done.set_result(None)

    async def ask(self, events: int) -> float:
        self.received, self.first = b"", 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        content = json.dumps(BODY | {"max_tokens": events * TOKENS}).encode()
        sent = time.perf_counter()
        self.transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)
        )
        await self.done
        return (self.first - sent) * 1e3


Cost = tuple[list[float], float]
"""TTFT of each request in ms, and the CPU of all of them in s."""


def by_raw(given: argparse.Namespace, pause_ms: float = 0.0) -> Cost:
    async def slot(left: list[int], found: list[float]) -> None:
        _, reader = await asyncio.get_running_loop().create_connection(Reader, "127.0.0.1", given.port)
        while left:
            left.pop()
            until = time.perf_counter() + pause_ms / 1e3
            while time.perf_counter() < until:
                await asyncio.sleep(0)
            found.append(await reader.ask(given.events))
        reader.transport.close()

    return asyncio.run(in_slots(given, slot))


def by_peer(given: argparse.Namespace) -> Cost:
    import aiohttp

    body = BODY | {"max_tokens": given.events * TOKENS}

    async def slot(left: list[int], found: list[float]) -> None:
        while left:
            left.pop()
            async with aiohttp.ClientSession(read_bufsize=10 * 2**20) as session:
                sent, first = time.perf_counter(), 0.0
                async with session.post(f"http://127.0.0.1:{given.port}/v1/chat/completions", json=body) as answer:
                    async for line in answer.content:
                        text = line.strip().decode().removeprefix("data: ")
                        if not text or text == "[DONE]":
                            continue
                        choices = json.loads(text)["choices"]
                        if choices and choices[0]["delta"].get("content") and not first:
                            first = time.perf_counter()
                found.append((first - sent) * 1e3)

    return asyncio.run(in_slots(given, slot))


async def in_slots(given: argparse.Namespace, slot: Any) -> Cost:
    left, found = list(range(given.requests)), list[float]()
    began = time.process_time()
    await asyncio.gather(*(slot(left, found) for _ in range(given.concurrency)))
    return found, time.process_time() - began


def by_ddtree(given: argparse.Namespace) -> Cost:
    """With all that it does between requests; what it does once for a run is left out of its CPU."""
    cpu_s: list[float] = []
    watcher = Watcher(on_unit=lambda unit: cpu_s.append(time.process_time()))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = (json.dumps({"id": str(number), "turns": [WORDS]}) + "\n" for number in range(given.requests))
        (folder / "prompts.jsonl").write_text("".join(lines))
        workload = read_workload(str(folder / "prompts.jsonl"))
        load = Load(
            repetitions=1,
            requests=given.requests,
            max_tokens=given.events * TOKENS,
            ignore_eos=True,
            warm_up_requests=0,
        )
        matrix = Matrix(workloads=(workload,), concurrencies=(given.concurrency,))
        options = RunOptions(url=f"http://127.0.0.1:{given.port}", folder=folder / "run", matrix=matrix, load=load)
        run_bench(options, watcher)
        cpu_s.append(time.process_time())
        rows = read_requests(folder / "run")
    assert not [row.error_kind for row in rows if row.error_kind], rows[0].error_text
    return [row.ttft_ms for row in rows if row.ttft_ms is not None], cpu_s[1] - cpu_s[0]


CLIENTS = {"ddtree bench": by_ddtree, "before": by_ddtree, "raw": by_raw, "peer": by_peer}


def run_one(given: argparse.Namespace) -> None:
    """One client's turn: a first round that is not kept, many events, few events."""
    client, many, requests = CLIENTS[given.only], given.events, given.requests
    given.requests, given.events = 2 * given.concurrency, 2
    client(given)
    given.requests, given.events = requests, many
    own_ms(given.port)
    ttft_ms, cpu_s = client(given)
    added_ms = statistics.median(ttft_ms) - statistics.median(own_ms(given.port))
    given.events = 2
    _, few_cpu_s = client(given)
    event_s = (cpu_s - few_cpu_s) / requests / (many - 2)
    cost = {
        "ttft_ms": statistics.median(ttft_ms),
        "added_ms": added_ms,
        "cpu_us_per_event": event_s * 1e6,
        "cpu_us_per_request": (few_cpu_s / requests - 2 * event_s) * 1e6,
    }
    print(json.dumps(cost))


def turn(given: argparse.Namespace, name: str) -> dict[str, float]:
    told = {key: getattr(given, key) for key in ("requests", "concurrency", "events", "port")}
    flags = [word for key, value in told.items() for word in (f"--{key}", str(value))]
    source = {"PYTHONPATH": str(given.before)} if name == "before" else {}
    command = [sys.executable, __file__, "--only", name, *flags]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | source)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def own_ms(port: int) -> list[float]:
    import httpx

    told: list[float] = httpx.get(f"http://127.0.0.1:{port}/own", trust_env=False).json()
    return told


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "lower_quartile": round(low, 3), "upper_quartile": round(high, 3)}


def ratios(costs: dict[str, list[dict[str, float]]], name: str, quantity: str) -> list[float]:
    """To the peer of the same turn."""
    return [own[quantity] / peer[quantity] for own, peer in zip(costs[name], costs["peer"], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--first-ms", type=float, default=6.0)
    parser.add_argument("--round-ms", type=float, default=2.1)
    parser.add_argument("--events", type=int, default=85)
    parser.add_argument("--port", type=int, default=28900)
    parser.add_argument(
        "--before", type=Path, metavar="SRC", help="sources of another ddtree, to measure beside this one"
    )
    parser.add_argument("--only", choices=list(CLIENTS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.only:
        return run_one(given)
    if given.out is None:
        parser.error("--out is missing")
    names = [name for name in CLIENTS if name != "before" or given.before]
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(given.port, given.first_ms / 1e3, given.round_ms / 1e3), daemon=True
    )
    server.start()
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", given.port)):
            break
        time.sleep(0.1)
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(given.runs):
        for name in names if number % 2 == 0 else reversed(names):
            costs[name].append(turn(given, name))
    pauses = [0.25 * step for step in range(9)]
    phase = {pause: [round(statistics.median(by_raw(given, pause)[0]), 2) for _ in range(3)] for pause in pauses}
    server.kill()
    content = {
        "what": "medians of runs in turns, each client in a process of its own: milliseconds of TTFT that a client "
        "adds to the server's own; TTFT as read; CPU of the client for an event and for a request without its events; "
        "TTFT of the raw client by its pause between an answer and its next request",
        "load": {
            name: getattr(given, name) for name in ("runs", "requests", "concurrency", "first_ms", "round_ms", "events")
        },
        **{
            quantity: {name: quartiles([cost[quantity] for cost in costs[name]]) for name in names}
            for quantity in ("added_ms", "ttft_ms", "cpu_us_per_event", "cpu_us_per_request")
        },
        "ratio_to_peer": {
            quantity: {name: quartiles(ratios(costs, name, quantity)) for name in names if name != "peer"}
            for quantity in ("ttft_ms", "cpu_us_per_event", "cpu_us_per_request")
        },
        "ttft_ms_by_pause_ms": phase,
        "versions": versions((*PACKAGES, "aiohttp")),
        "commit": commit(),
        "host": host(),
    }
    given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: told for name, told in content.items() if name not in ("versions", "host")}, indent=1))
    return None


if __name__ == "__main__":
    main()
