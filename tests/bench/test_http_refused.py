"""What the measuring client does not take from a server, and what it tells of it."""

from __future__ import annotations

import asyncio
import gzip
import socket

import pytest

from bench.raw_server import DONE, END, KEY, STREAM, asked, chunk, event, good, raw_server
from ddtree.bench import http_client
from ddtree.bench.answer import ask
from ddtree.bench.endpoint import connect, make_client
from ddtree.errors import UserError


def test_times_on_a_loop_that_reads_past_the_sockets(monkeypatch):
    """As uvloop does: the socket never hears of its bytes."""

    class Unasked(socket.socket):
        came_s = 0.0

    async def later(head):
        yield STREAM
        await asyncio.sleep(0.1)
        yield event("one")
        await asyncio.sleep(0.3)
        yield event("two") + DONE

    monkeypatch.setattr(http_client, "_TimedSocket", Unasked)
    with raw_server(later) as server:
        (answer,) = asked(server)
    first, second = answer.chunk_ms
    assert answer.error_kind is None and 90 < first < second - 30 and second <= answer.end_ms


async def two_answers_at_once(head):
    yield STREAM + event("one")
    await asyncio.sleep(0.05)
    yield DONE + STREAM + event("two") + DONE


async def an_answer_and_a_head(head):
    yield STREAM + event("one")
    await asyncio.sleep(0.05)
    yield DONE + STREAM
    await asyncio.sleep(0.2)
    yield event("two") + DONE


@pytest.mark.parametrize("answering", [two_answers_at_once, an_answer_and_a_head])
def test_an_answer_that_was_there_before_its_request_is_none(answering):
    with raw_server(answering) as server:
        answers = asked(server, times=3)
        assert [answer.error_kind for answer in answers] == [None, "broken_stream", None]
        assert [answer.text for answer in answers] == ["one", "", "one"]
        assert "more on this connection than it was asked for" in answers[1].error_text
        assert server.connections == 2, "the connection was used again"


BODY = b'data: {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(("coding", "packed"), [("gzip", gzip.compress(BODY, mtime=0)), ("br", b"\x8b"), ("zzz", BODY)])
def test_nothing_is_decompressed(coding, packed):
    async def compressed(head):
        about = f"HTTP/1.1 200 OK\r\ncontent-encoding: {coding}\r\ncontent-length: {len(packed)}\r\n\r\n"
        yield about.encode() + packed

    with raw_server(compressed) as server:
        (answer,) = asked(server)
        assert (answer.error_kind, answer.text) == ("broken_stream", "")
        assert f"coded as {coding}" in answer.error_text
        assert b"\r\naccept-encoding: identity\r\n" in server.heads[0].lower()
        with pytest.raises(UserError, match=f"coded as {coding}"):
            asyncio.run(connected(server))


async def connected(server):
    url = f"http://127.0.0.1:{server.port}"
    async with make_client(url, KEY) as client:
        return await connect(url, client, None)


def test_identity_is_no_compression():
    async def told_so(head):
        yield STREAM.replace(b"\r\n\r\n", b"\r\ncontent-encoding: Identity\r\n\r\n") + event("x") + DONE

    with raw_server(told_so) as server:
        (answer,) = asked(server)
        assert (answer.error_kind, answer.text) == (None, "x")


def test_cookies_are_not_sent_back():
    async def cookie(head):
        yield STREAM.replace(b"\r\n\r\n", b"\r\nset-cookie: replica=7; Path=/\r\n\r\n") + event("x") + DONE

    async def run(url):
        async with make_client(url, None) as client:
            for _ in range(2):
                assert (await ask(client, url, {}, 5.0, 1.0)).error_kind is None

    with raw_server(cookie) as server:
        asyncio.run(run(f"http://localhost:{server.port}"))  # by its name: addresses get no cookies anyway
        assert len(server.heads) == 2 and b"cookie" not in server.heads[1].lower()


def refusal(body: bytes) -> bytes:
    return b"HTTP/1.1 500 No\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize(
    "told",
    [
        refusal(b'{"error": {"message": "the key %b is bad"}}' % KEY.encode()),
        refusal(b"x" * 495 + KEY.encode()),  # where it is cut
        STREAM + chunk(b'data: {"error": "%b is bad"}\n\n' % KEY.encode()) + END,
        KEY.encode() + b" this is no HTTP\r\n\r\n",
    ],
)
def test_an_error_does_not_tell_the_key(told):
    async def echo(head):
        yield told
        await asyncio.sleep(0.2)

    with raw_server(echo) as server:
        (answer,) = asked(server)
        assert answer.error_kind and KEY[:5] not in answer.error_text
        assert KEY not in repr(answer)
        with pytest.raises(UserError) as refused:
            asyncio.run(connected(server))
        assert KEY[:5] not in str(refused.value)


def test_a_stall_is_told_in_time():
    async def one(head):
        yield STREAM + event("x")
        await asyncio.sleep(5)

    with raw_server(one) as server:
        (answer,) = asked(server, stall_timeout_s=1.0)
    assert answer.error_kind == "stalled" and 990 < answer.end_ms - answer.chunk_ms[0] < 1400


def test_a_good_answer_is_still_good():
    """Many on one connection: nothing of the above is seen where there is nothing."""
    with raw_server(good) as server:
        assert {(answer.error_kind, answer.text) for answer in asked(server, times=30)} == {(None, "one two")}
        assert server.connections == 1
