"""The time that a client adds to TTFT: three clients in turns against a server that times its own first text.

    python benchmarks/bench_client_cost.py --runs 15 --out benchmarks/results/bench_client_cost_cpu.json

The server keeps rounds as an engine does: every ``--round-ms`` each running request gets an event, and a new one joins
the first round that begins ``--first-ms`` after it came. What a client reads beyond the server's own time is the
client's. `raw` reads a socket and looks for the text; `peer` reads as SGLang's bench_serving does, with aiohttp and a
connection for each request, where aiohttp is installed. ``phase`` shows what a pause between an answer and the next
request does to TTFT, with everything else the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

from ddtree.bench.plan import Load, Matrix
from ddtree.bench.provenance import PACKAGES, commit, host, versions
from ddtree.bench.result_folder import read_requests
from ddtree.bench.run import RunOptions, run_bench
from ddtree.bench.workload import read_workload

TEXT, TOKENS, WORDS = " some words of it", 6, "word " * 100
BODY = {"model": "m", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 4096, "stream": True}
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
    events = 0
    event = end = b""

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
            self.came, self.left = time.perf_counter(), self.events
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
        self.transport.write(self.event + (b"" if self.left else self.end))


def serve(port: int, first_s: float, round_s: float, events: int) -> None:
    async def rounds() -> None:
        usage = {"prompt_tokens": 1, "completion_tokens": events * TOKENS}
        Server.events, Server.event = events, choice({"content": TEXT})
        Server.end = choice({}, "length") + chunk({"choices": [], "usage": usage}) + chunk("[DONE]") + b"0\r\n\r\n"
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

    async def ask(self) -> float:
        self.received, self.first = b"", 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        content = json.dumps(BODY).encode()
        sent = time.perf_counter()
        self.transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)
        )
        await self.done
        return (self.first - sent) * 1e3


def by_raw(given: argparse.Namespace, pause_ms: float = 0.0) -> list[float]:
    async def slot(left: list[int], found: list[float]) -> None:
        _, reader = await asyncio.get_running_loop().create_connection(Reader, "127.0.0.1", given.port)
        while left:
            left.pop()
            until = time.perf_counter() + pause_ms / 1e3
            while time.perf_counter() < until:
                await asyncio.sleep(0)
            found.append(await reader.ask())
        reader.transport.close()

    return asyncio.run(in_slots(given, slot))


def by_peer(given: argparse.Namespace) -> list[float]:
    import aiohttp  # type: ignore[import-not-found]

    async def slot(left: list[int], found: list[float]) -> None:
        while left:
            left.pop()
            async with aiohttp.ClientSession(read_bufsize=10 * 2**20) as session:
                sent, first = time.perf_counter(), 0.0
                async with session.post(f"http://127.0.0.1:{given.port}/v1/chat/completions", json=BODY) as answer:
                    async for line in answer.content:
                        text = line.strip().decode().removeprefix("data: ")
                        if not text or text == "[DONE]":
                            continue
                        choices = json.loads(text)["choices"]
                        if choices and choices[0]["delta"].get("content") and not first:
                            first = time.perf_counter()
                found.append((first - sent) * 1e3)

    return asyncio.run(in_slots(given, slot))


async def in_slots(given: argparse.Namespace, slot: Any) -> list[float]:
    left, found = list(range(given.requests)), list[float]()
    await asyncio.gather(*(slot(left, found) for _ in range(given.concurrency)))
    return found


def by_ddtree(given: argparse.Namespace) -> list[float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = (json.dumps({"id": str(number), "turns": [WORDS]}) + "\n" for number in range(given.requests))
        (folder / "prompts.jsonl").write_text("".join(lines))
        workload = read_workload(str(folder / "prompts.jsonl"))
        load = Load(repetitions=1, requests=given.requests, max_tokens=4096, ignore_eos=True, warm_up_requests=0)
        matrix = Matrix(workloads=(workload,), concurrencies=(given.concurrency,))
        run_bench(RunOptions(url=f"http://127.0.0.1:{given.port}", folder=folder / "run", matrix=matrix, load=load))
        rows = read_requests(folder / "run")
    assert not [row.error_kind for row in rows if row.error_kind], rows[0].error_text
    return [row.ttft_ms for row in rows if row.ttft_ms is not None]


def own_ms(port: int) -> list[float]:
    import httpx

    told: list[float] = httpx.get(f"http://127.0.0.1:{port}/own", trust_env=False).json()
    return told


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "lower_quartile": round(low, 3), "upper_quartile": round(high, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--first-ms", type=float, default=6.0)
    parser.add_argument("--round-ms", type=float, default=2.1)
    parser.add_argument("--events", type=int, default=85)
    parser.add_argument("--port", type=int, default=28900)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    clients = {"ddtree bench": by_ddtree, "raw": by_raw}
    if importlib.util.find_spec("aiohttp"):
        clients["peer"] = by_peer
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(given.port, given.first_ms / 1e3, given.round_ms / 1e3, given.events), daemon=True
    )
    server.start()
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", given.port)):
            break
        time.sleep(0.1)
    added: dict[str, list[float]] = {name: [] for name in clients}
    read: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(given.runs):
        for name, client in clients.items():
            own_ms(given.port)
            found = statistics.median(client(given))
            read[name].append(found)
            added[name].append(found - statistics.median(own_ms(given.port)))
    pauses = [0.25 * step for step in range(9)]
    phase = {pause: [round(statistics.median(by_raw(given, pause)), 2) for _ in range(3)] for pause in pauses}
    server.kill()
    content = {
        "what": "milliseconds of TTFT that a client adds to the server's own, medians of runs in turns; TTFT as read; "
        "TTFT of the raw client by its pause between an answer and its next request",
        "load": {
            name: getattr(given, name) for name in ("runs", "requests", "concurrency", "first_ms", "round_ms", "events")
        },
        "added_ms": {name: quartiles(values) for name, values in added.items()},
        "ttft_ms": {name: quartiles(values) for name, values in read.items()},
        "ttft_ms_by_pause_ms": phase,
        "versions": versions(PACKAGES),
        "commit": commit(),
        "host": host(),
    }
    given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: content[name] for name in ("added_ms", "ttft_ms", "ttft_ms_by_pause_ms")}, indent=1))


if __name__ == "__main__":
    main()
