"""From the first stage to the last answer: readiness, queue, deadlines, faults, clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from live import Live, Valve, live, raw_request, tiny_loader

from ddtree import SamplingParams
from ddtree.errors import UserError
from ddtree.server.answer_format import CompletionFormat
from ddtree.server.answer_response import AnswerResponse
from ddtree.server.plan import Plan
from ddtree.server.service import Work

LONG = {"prompt": "abc", "max_tokens": 200, "temperature": 0, "ddtree": {"mode": "ar"}}


@pytest.fixture
def valve(tiny_folders):
    valve = Valve(tiny_loader(tiny_folders, max_batch=2))
    yield valve
    valve.open()


def ask(server: Live, **fields) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=LONG | fields, timeout=30)


def until(condition, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ready_only_after_a_token(tiny_folders):
    load, may_load, may_warm_up = tiny_loader(tiny_folders), threading.Event(), threading.Event()

    def slow(tell):
        tell("loading the model", 0.4)
        may_load.wait(30)
        engine = load(tell)
        generate = engine.generate

        def warm_up(*args, **kwargs):
            may_warm_up.wait(30)
            return generate(*args, **kwargs)

        engine.generate = warm_up
        return engine

    with live(slow, wait=False) as server:

        def ready():
            return httpx.get(f"{server.url}/ready")

        until(lambda: ready().json()["stage"] == "loading the model")
        assert ready().status_code == 503 and ready().json() == {
            "ready": False, "stage": "loading the model", "progress": 0.4,
        }  # fmt: skip
        assert ready().headers["retry-after"]
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/server_info").json()["effective"]["engine"] is None
        assert server.metric("ddtree_ready") == 0
        refused = ask(server)
        assert refused.status_code == 503 and "loading the model" in refused.json()["error"]["message"]
        may_load.set()
        until(lambda: ready().json()["stage"] == "warming up")
        assert ready().status_code == 503 and ask(server).status_code == 503
        may_warm_up.set()
        until(lambda: ready().status_code == 200)
        assert ask(server, max_tokens=2).status_code == 200
        assert server.metric("ddtree_ready") == 1


def test_an_engine_that_cannot_be_loaded_ends_the_server(tiny_folders):
    def fail(tell):
        raise UserError("no such model", "give another")

    with live(fail, wait=False) as server:
        until(lambda: server.engine_ends)
        assert isinstance(server.engine_ends[0], UserError)
        assert httpx.get(f"{server.url}/ready").status_code == 503


def test_a_full_queue_is_429_and_a_long_wait_503(valve):
    with live(valve, max_queue=1, queue_timeout_s=0.5) as server, ThreadPoolExecutor(8) as pool:
        valve.close()
        first = [pool.submit(ask, server, max_tokens=3) for _ in range(2)]
        until(lambda: server.service.unfinished == 2)
        third = pool.submit(ask, server, max_tokens=3)
        until(lambda: server.service.unfinished == 3)
        refused = ask(server)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1" and refused.json()["error"]["type"] == "rate_limit_error"
        for waiting in (*first, third):  # nothing has begun: the engine is held up
            assert waiting.result().status_code == 503
            assert waiting.result().json()["error"]["code"] == "queue_timeout"
        valve.open()
        assert server.is_empty()
        assert ask(server, max_tokens=3).status_code == 200


def test_what_waits_its_turn_is_answered_in_order(valve, tiny_engine):
    with live(valve, max_queue=10) as server, ThreadPoolExecutor(8) as pool:
        valve.close()
        answers = []
        for i in range(6):
            answers.append(pool.submit(ask, server, max_tokens=5 + i, prompt="abcdef"[i]))
            until(lambda i=i: server.service.unfinished == i + 1)
        valve.open()
        texts = [answer.result().json()["choices"][0]["text"] for answer in answers]
        alone = [ask(server, max_tokens=5 + i, prompt="abcdef"[i]).json()["choices"][0]["text"] for i in range(6)]
        assert texts == alone


def test_an_answer_that_takes_too_long(valve):
    with live(valve, request_timeout_s=0.4) as server, ThreadPoolExecutor(2) as pool:
        began = threading.Event()

        def hold():
            until(lambda: server.service.pulse.look().occupancy.running)
            valve.close()
            began.set()

        pool.submit(hold)
        answer = ask(server, ignore_eos=True)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "request_timeout"
        valve.open()
        assert server.is_empty()


def test_a_failed_round_harms_only_what_ran(valve):
    with live(valve, max_queue=10) as server:
        valve.fault = RuntimeError("a kernel failed")
        failed = ask(server)
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "engine_fault"
        assert "kernel" not in failed.text, "details are for the log"
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        assert ask(server, max_tokens=3).status_code == 200
        assert server.metric("ddtree_failed_steps_total") == 1
        assert server.is_empty()


def test_a_stream_that_fails_says_so(valve):
    with live(valve) as server, httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}) as s:
        lines = s.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
        valve.fault = RuntimeError("a kernel failed")
        rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_fault"
        assert "data: [DONE]" not in rest


def test_a_round_that_never_ends_makes_the_server_not_ready(valve):
    with live(valve, stall_s=0.2) as server, ThreadPoolExecutor(1) as pool:
        valve.close()
        answer = pool.submit(ask, server, max_tokens=3)
        until(lambda: "stalled" in httpx.get(f"{server.url}/ready").json()["stage"])
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert ask(server).status_code == 503
        valve.open()
        assert answer.result().status_code == 200
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(valve, stream):
    with live(valve) as server:
        for _ in range(3):
            body = json.dumps(LONG | {"stream": stream, "n": 2}).encode()
            with socket.create_connection(server.address) as line:
                line.sendall(raw_request(body))
                until(lambda: server.service.pulse.look().occupancy.running == 2)
                if stream:
                    assert line.recv(100).startswith(b"HTTP/1.1 200")
                valve.close()
            until(lambda: server.service.unfinished == 0)
            valve.open()
            assert server.is_empty()
        assert server.metric("ddtree_cancelled_requests_total") == 3
        assert server.metric("ddtree_completion_tokens_total") < 3 * 400 / 2, "they were not generated to their ends"
        assert ask(server, max_tokens=3).status_code == 200


def test_a_client_that_leaves_the_queue(valve):
    with live(valve) as server:
        valve.close()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=0.3)
        until(lambda: server.service.unfinished == 0)
        valve.open()
        assert server.is_empty()


def test_a_slow_reader_gets_all_and_holds_up_nobody(valve):
    with live(valve) as server:
        body = json.dumps(LONG | {"stream": True}).encode()
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        line.connect(server.address)
        with line:
            line.sendall(raw_request(body))
            until(lambda: server.service.unfinished == 1)
            until(lambda: server.service.unfinished == 0)  # the engine does not wait for the reader
            assert ask(server, max_tokens=3).status_code == 200
            got = b""
            while b"[DONE]" not in got:
                got += line.recv(512)
        events = [json.loads(e[6:]) for e in _events(got) if e.startswith("data: {")]
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text == ask(server).json()["choices"][0]["text"]


def _events(raw: bytes) -> list[str]:
    """Events of a chunked HTTP/1.1 answer."""
    content, rest = b"", raw.split(b"\r\n\r\n", 1)[1]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size or b"0", 16)
        content, rest = content + rest[:length], rest[length + 2 :]
    return content.decode().split("\n\n")


def test_a_reader_that_never_reads_is_given_up(valve):
    """Its buffers full, `send` does not come back; to fill real ones takes megabytes, so here it never does."""
    with live(valve, client_timeout_s=0.3) as server:
        engine = server.service.thread.engine
        work = Work(engine.tokenizer.encode("abc"), SamplingParams(max_new_tokens=200), None)
        plan = Plan([work], [3], stream=True, include_usage=False)

        async def never(message=None):
            await asyncio.Event().wait()

        async def answer():
            await AnswerResponse(server.service, plan, CompletionFormat("tiny", engine.tokenizer, False))(
                {"type": "http"}, never, never
            )

        asyncio.run_coroutine_threadsafe(answer(), server.service.thread._loop).result(10)
        assert server.metric("ddtree_cancelled_requests_total") == 1
        assert server.is_empty()
