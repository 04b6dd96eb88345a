"""Two thousand requests, good, bad and broken off: every answer right and whole, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Live, live, tiny_loader

from ddtree import Engine, SamplingParams, Speculation
from ddtree.engine import Sequence
from ddtree.server.answer_response import AnswerResponse
from ddtree.server.job import Job
from ddtree.server.service import Answer
from tiny_models import SPECIAL_TOKENS, make_drafter, make_target

REQUESTS = 2000
AT_ONCE = 24
TREE = Speculation("tree", 9)  # one draft for all, so that one round serves all; test_load.py mixes them
EMOJI = "🙂🎉🚀 naïve 日本語"


@pytest.fixture(scope="module")
def byte_folders(tmp_path_factory) -> tuple[Path, Path]:
    """A tiny pair whose tokens are single bytes, so that every emoji is split over four of them."""
    folder = tmp_path_factory.mktemp("bytes")
    vocab = len(SPECIAL_TOKENS) + 256
    target = make_target(folder / "tiny", "llama", eos_token_id=None, vocab_size=vocab)
    file = target / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer["model"]["vocab"] = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    tokenizer["model"]["vocab"] |= {names[byte]: len(SPECIAL_TOKENS) + byte for byte in range(256)}
    file.write_text(json.dumps(tokenizer))
    return target, make_drafter(folder / "drafter", target, block_size=6)


def good(i: int) -> dict[str, Any]:
    """One of 40 requests whose answers are known beforehand; with emoji, and with stop strings that fall anywhere."""
    i %= 40
    return {
        "prompt": (EMOJI * 3)[i % 7 :] + "abcdef"[: i % 6], "seed": i, "max_tokens": 7 + i % 9,
        "temperature": 0 if i % 3 else 1.2, "stop": STOPS.get(i), "logprobs": 0,
    }  # fmt: skip


STOPS: dict[int, list[str]] = {}


def own_answer(engine: Engine, i: int) -> tuple[str, int, str]:
    fields = good(i)
    params = SamplingParams(
        max_new_tokens=fields["max_tokens"], temperature=fields["temperature"], seed=fields["seed"],
        stop=tuple(fields["stop"] or ()),
    )  # fmt: skip
    done = engine.generate([fields["prompt"]], params, speculation=Speculation("ar"))[0]
    return done.text, len(done.token_ids), done.finish_reason


@pytest.fixture(scope="module")
def expected(byte_folders) -> dict[int, tuple[str, int, str]]:
    engine = tiny_loader(byte_folders)(lambda stage, progress: None)
    answers = {i: own_answer(engine, i) for i in range(40)}
    for i in range(0, 40, 2):  # a stop of several characters, from within the answer
        text = answers[i][0]
        if len(text) > 6 and "�" not in text[3:6]:
            STOPS[i] = [text[3:6], "never said"]
    answers |= {i: own_answer(engine, i) for i in STOPS}
    assert sum(answers[i][2] == "stop" for i in STOPS) == len(STOPS) > 4
    return answers


async def whole(client: httpx.AsyncClient, i: int, expected: dict[int, Any]) -> None:
    answer = await client.post("/v1/completions", json=good(i))
    assert answer.status_code == 200, answer.text
    choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    assert (choice["text"], usage["completion_tokens"], choice["finish_reason"]) == expected[i % 40]


async def streamed(client: httpx.AsyncClient, i: int, expected: dict[int, Any]) -> None:
    body = good(i) | {"stream": True, "stream_options": {"include_usage": True}}
    text, reasons, tokens, lines = "", [], 0, []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            lines.append(line)
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for event in events:
        for choice in event["choices"]:
            text += choice["text"]
            tokens += len(choice["logprobs"]["tokens"])
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert len(reasons) == 1, "a stream ends with one finish reason"
    assert tokens == events[-1]["usage"]["completion_tokens"], "usage is what was received"
    assert (text, tokens, reasons[0]) == expected[i % 40]


async def leaves(client: httpx.AsyncClient, i: int, dice: random.Random) -> None:
    """Goes away: in the middle of a stream, or while it waits."""
    body = {"prompt": "abc", "max_tokens": 60, "n": 1 + i % 2, "stream": bool(i % 3)}
    if body["stream"]:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code in (200, 429), response.status_code
            left = dice.randrange(4)
            async for _ in response.aiter_lines():
                if not left:
                    break
                left -= 1
    else:
        try:
            answer = await client.post("/v1/completions", json=body, timeout=dice.random() / 20)
            assert answer.status_code in (200, 429)
        except httpx.TimeoutException:
            pass


async def broken(client: httpx.AsyncClient, i: int, dice: random.Random) -> None:
    """Bodies that are no requests."""
    whole_body = json.dumps(good(i)).encode()
    bodies = [
        whole_body[: dice.randrange(len(whole_body))], b"{" * 500, b"\xff\xfe", b"", b"[1, 2]", whole_body + b"}",
        whole_body.replace(b":", b";", 1), b'{"prompt": "\\ud83d"}',
    ]  # fmt: skip
    answer = await client.post(
        "/v1/completions", content=bodies[i % len(bodies)], headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["message"]


async def impossible(client: httpx.AsyncClient, i: int) -> None:
    """Huge and empty prompts, and fields that cannot be honoured."""
    fields = [{"prompt": "x" * 200_000}, {"prompt": ""}, {"prompt": [[]]}, {"prompt": EMOJI * 100}, {"n": 1000}]
    answer = await client.post("/v1/completions", json={"prompt": "a"} | fields[i % len(fields)])
    assert answer.status_code == 400, answer.text


def leftovers() -> Counter[str]:
    gc.collect()
    kinds = {Job, Sequence, Answer, AnswerResponse}
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)


def resources(server: Live) -> dict[str, int]:
    """What must be as before: tasks of the server's loop, threads, open files, objects of requests."""
    tasks = asyncio.run_coroutine_threadsafe(_tasks(), server.service.thread._loop).result(10)
    return {
        "tasks": tasks, "threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd")), **leftovers(),
    }  # fmt: skip


async def _fill_pool() -> None:
    """Start all threads of the loop's own pool, which stay."""
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(loop.run_in_executor(None, time.sleep, 0.05) for _ in range(64)))


async def _tasks() -> int:
    return len(asyncio.all_tasks())


@asynccontextmanager
async def client_of(url: str):
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        yield client


async def crowd(url: str, numbers: list[int], expected: dict[int, Any]) -> Counter[str]:
    dice, counts, todo = random.Random(5), Counter(), iter(numbers)
    async with client_of(url) as client:

        async def one() -> None:
            for i in todo:
                kind = ("whole", "streamed", "leaves", "broken", "streamed", "impossible", "leaves", "whole")[i % 8]
                match kind:
                    case "whole":
                        await whole(client, i, expected)
                    case "streamed":
                        await streamed(client, i, expected)
                    case "leaves":
                        await leaves(client, i // 8, dice)
                    case "broken":
                        await broken(client, i // 8, dice)
                    case "impossible":
                        await impossible(client, i // 8)
                counts[kind] += 1

        await asyncio.gather(*(one() for _ in range(AT_ONCE)))
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")
def test_two_thousand_requests_leave_nothing_behind(byte_folders, expected):
    numbers = list(range(REQUESTS))
    random.Random(5).shuffle(numbers)
    began = time.monotonic()
    load = tiny_loader(byte_folders, max_batch=16, prefill_tokens=48, prefix_cache=True, speculation=TREE)
    with live(load, max_queue=2 * AT_ONCE) as server:
        asyncio.run(crowd(server.url, numbers[:80], expected))
        asyncio.run_coroutine_threadsafe(_fill_pool(), server.service.thread._loop).result(30)
        assert server.is_empty()
        before = settled(server)
        counts = asyncio.run(crowd(server.url, numbers, expected))
        assert counts.total() == REQUESTS and min(counts.values()) >= 250
        assert server.is_empty(), "no job, no sequence, no page is left"
        engine = server.service.thread.engine
        kept = [*engine._pool._free, *engine._prefixes._by_page]
        assert sorted(kept) == list(range(1, engine._pool.n_pages)), "no page is lost, none is owned twice"
        assert sorted(engine._seating._free_slots) == list(range(16))
        after = settled(server, like=before)
        assert all(after[name] <= before.get(name, 0) for name in after), (before, after)
        assert server.metric("ddtree_failed_steps_total") == 0
        assert server.metric("ddtree_requests_total", status="500") == 0
        assert server.metric("ddtree_cancelled_requests_total") > 100
        assert server.metric("ddtree_cached_prompt_tokens_total") > 1000
        asyncio.run(crowd(server.url, numbers[:16], expected))
    print(f"{REQUESTS} requests in {time.monotonic() - began:.1f} s: {dict(counts)}")


def settled(server: Live, like: dict[str, int] | None = None) -> dict[str, int]:
    """Resources once connections are closed; waits for ``like`` as long as may be needed."""
    deadline = time.monotonic() + 10
    while True:
        now = resources(server)
        if like is None and now["tasks"] <= 4:
            return now
        if like is not None and all(now[name] <= like.get(name, 0) for name in now):
            return now
        if time.monotonic() > deadline:
            return now
        time.sleep(0.1)
