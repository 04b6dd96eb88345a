"""The measuring client: its clock, its connections, and servers that mean it ill."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from bench.raw_server import DONE, END, KEY, STREAM, asked, chunk, event, good, raw_server
from ddtree.bench import answer as answer_module
from ddtree.bench import http_client
from ddtree.bench.answer import ask
from ddtree.bench.endpoint import connect, make_client
from ddtree.bench.measure import _Lag
from ddtree.errors import UserError


def test_a_good_answer():
    with raw_server(good) as server:
        (answer,) = asked(server)
    assert (answer.error_kind, answer.text, answer.chunk_chars) == (None, "one two", [4, 3])
    assert 0 < answer.chunk_ms[0] <= answer.chunk_ms[1] <= answer.end_ms
    assert f"authorization: Bearer {KEY}".encode() in server.heads[0].replace(b"Authorization", b"authorization")


def test_a_connection_is_used_again():
    with raw_server(good) as server:
        assert [answer.error_kind for answer in asked(server, times=5)] == [None] * 5
        assert server.connections == 1


def test_an_idle_connection_is_left_before_the_server_closes_it(monkeypatch):
    monkeypatch.setattr(http_client, "_KEPT_S", 0.05)

    async def run(url):
        async with make_client(url, None) as client:
            for _ in range(2):
                assert (await ask(client, url, {}, 5.0, 1.0)).error_kind is None
                time.sleep(0.1)  # the loop itself is kept from seeing a close

    with raw_server(good) as server:
        asyncio.run(run(f"http://127.0.0.1:{server.port}"))
        assert server.connections == 2


def test_as_many_connections_as_are_asked_for():
    most = []

    async def slow(head):
        yield STREAM
        await asyncio.sleep(0.5)
        most.append(server.now)
        yield event("x") + DONE

    async def run(url):
        async with make_client(url, None) as client:
            return await asyncio.gather(*(ask(client, url, {}, 20.0, 5.0) for _ in range(150)))

    with raw_server(slow) as server:
        answers = asyncio.run(run(f"http://127.0.0.1:{server.port}"))
        assert {answer.error_kind for answer in answers} == {None} and max(most) == 150


def test_events_of_one_read_have_one_time():
    async def together(head):
        yield STREAM
        await asyncio.sleep(0.05)
        yield event("a") + event("b") + event("c")
        await asyncio.sleep(0.3)
        yield event("d") + DONE

    with raw_server(together) as server:
        (answer,) = asked(server)
    first, second, third, last = answer.chunk_ms
    assert first == second == third and last - first > 40


def test_the_time_is_that_of_the_bytes_and_not_of_reading_them(monkeypatch):
    """Events of two streams wait while the loop is busy, and reading each takes 50 ms: both came at the same time."""
    slow_read = answer_module._take

    def slowly(data, answer, now_ms):
        time.sleep(0.05)
        return slow_read(data, answer, now_ms)

    monkeypatch.setattr(answer_module, "_take", slowly)

    async def after_a_while(head):
        yield STREAM
        await asyncio.sleep(0.2)
        yield event("x") + DONE

    async def run(url):
        async with make_client(url, None) as client:
            asking = asyncio.gather(*(ask(client, url, {}, 5.0, 1.0) for _ in range(2)))
            await asyncio.sleep(0.1)
            time.sleep(0.3)
            return await asking

    with raw_server(after_a_while) as server:
        one, other = asyncio.run(run(f"http://127.0.0.1:{server.port}"))
    assert abs(one.chunk_ms[0] - other.chunk_ms[0]) < 25


def test_a_loop_that_was_busy_is_seen():
    async def run():
        with _Lag() as lag:
            await asyncio.sleep(0.05)
            before = lag.worst_ms
            time.sleep(0.2)
            await asyncio.sleep(0.05)
        return before, lag.worst_ms

    before, after = asyncio.run(run())
    assert before < 150 < after < 2000


async def garbage(head):
    yield b"this is no HTTP\r\n\r\n"
    await asyncio.sleep(5)


async def endless_header(head):
    yield b"HTTP/1.1 200 OK\r\nx: "
    while True:
        yield b"y" * 2**16


async def endless_headers(head):
    yield b"HTTP/1.1 200 OK\r\n"
    for number in itertools.count():
        yield b"x-%d: y\r\n" % number


async def endless_refusal(head):
    yield b"HTTP/1.1 503 No\r\ncontent-type: text/plain\r\n\r\n"
    while True:
        yield b"out of luck " * 2**12


async def redirect(head):
    if b"/elsewhere" in head:
        yield STREAM + event("x") + DONE
    yield b"HTTP/1.1 307 Go\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n"


async def bad_chunk(head):
    yield STREAM + event("x") + b"zz\r\nwhat\r\n"
    await asyncio.sleep(5)


async def closes_at_once(head):
    raise ConnectionResetError
    yield b""


async def cut_in_an_event(head):
    yield STREAM + event("x") + b"40\r\ndata: {"
    raise ConnectionResetError


async def shorter_than_told(head):
    yield b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\ndata: {}\n\n"
    raise ConnectionResetError


async def no_done(head):
    yield STREAM + event("x") + END


async def endless_event(head):
    yield STREAM
    while True:
        yield chunk(b"data: " + b"x" * 2**18)


async def endless_empty_lines_of_one_event(head):
    yield STREAM
    while True:
        yield chunk(b"data:\n" * 2**15)


async def too_deep(head):
    yield STREAM + chunk(b"data: " + b"[" * 100_000 + b"\n\n")
    await asyncio.sleep(5)


async def two_values(head):
    yield STREAM + chunk(b"data: {} {}\n\n")
    await asyncio.sleep(5)


async def not_utf_8(head):
    yield STREAM + chunk(b'data: {"choices": "\xff"}\n\n')
    await asyncio.sleep(5)


async def a_list(head):
    yield STREAM + chunk(b"data: []\n\n")
    await asyncio.sleep(5)


async def silent(head):
    await asyncio.sleep(5)
    yield b""


async def opening_and_silence(head):
    yield STREAM + chunk(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n')
    await asyncio.sleep(5)


async def goes_on_after_the_limit(head):
    yield STREAM
    for _ in range(100):
        yield event("x")
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("answering", "kind"),
    [
        (garbage, "broken_stream"),
        (endless_header, "broken_stream"),
        (endless_headers, "broken_stream"),
        (endless_refusal, "http_503"),
        (redirect, "http_307"),
        (bad_chunk, "broken_stream"),
        (closes_at_once, "broken_stream"),
        (cut_in_an_event, "broken_stream"),
        (shorter_than_told, "broken_stream"),
        (no_done, "broken_stream"),
        (endless_event, "broken_stream"),
        (endless_empty_lines_of_one_event, "broken_stream"),
        (too_deep, "broken_stream"),
        (two_values, "broken_stream"),
        (not_utf_8, "broken_stream"),
        (a_list, "broken_stream"),
        (silent, "timeout"),
        (opening_and_silence, "stalled"),
        (goes_on_after_the_limit, "timeout"),
    ],
)
def test_bad_servers(answering, kind):
    limits = {"request_timeout_s": 1.5, "stall_timeout_s": 0.5} if kind in ("timeout", "stalled") else {}
    with raw_server(answering) as server:
        began = time.monotonic()
        (answer,) = asked(server, **limits)
        assert answer.error_kind == kind, answer.error_text
        assert time.monotonic() - began < 4 and server.sent_bytes < 2**26
        assert KEY not in answer.error_text and len(answer.error_text) <= 500
        assert len(server.heads) == 1, "it asked again"


def test_a_stall_is_not_seen_before_its_time():
    """The timer is set anew only now and then, and late rather than early."""

    async def slow(head):
        yield STREAM
        for _ in range(6):
            await asyncio.sleep(0.4)
            yield event("x")
        yield DONE

    with raw_server(slow) as server:
        (answer,) = asked(server, stall_timeout_s=0.8)
        assert answer.error_kind is None and answer.text == "xxxxxx"


def test_no_server():
    with raw_server(good) as server:
        pass
    (answer,) = asked(server)
    assert answer.error_kind == "no_connection" and KEY not in answer.error_text
    with pytest.raises(UserError, match="nothing answers at"):
        asyncio.run(connected(server))


async def connected(server):
    url = f"http://127.0.0.1:{server.port}"
    async with make_client(url, KEY) as client:
        return await connect(url, client, None)


def test_an_endless_account_of_the_server_is_left(monkeypatch):
    monkeypatch.setattr(http_client, "_MOST_BYTES", 2**20)
    with raw_server(endless_refusal) as server:
        with pytest.raises(UserError, match="more than 1 MiB"):
            asyncio.run(connected(server))
        assert KEY.encode() in server.heads[0]


def test_a_request_that_is_given_up_leaves_no_connection():
    async def run(url):
        async with make_client(url, None) as client:
            asking = asyncio.create_task(ask(client, url, {}, 60.0, 60.0))
            while not server.heads:
                await asyncio.sleep(0.01)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            for _ in range(100):
                if not server.now:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("the server still has the connection")

    async def goes_on(head):
        yield STREAM
        while True:
            yield event("x")
            await asyncio.sleep(0.01)

    with raw_server(goes_on) as server:
        asyncio.run(run(f"http://127.0.0.1:{server.port}"))
