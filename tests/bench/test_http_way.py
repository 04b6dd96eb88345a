"""How the measuring client gets to a server: TLS, proxies, and what each of them is told."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess

import pytest

from bench.raw_server import DONE, KEY, STREAM, asked, event, good, raw_server
from ddtree.bench import http_client
from ddtree.bench.answer import ask
from ddtree.bench.endpoint import Endpoint, clean_url, make_client
from ddtree.bench.http_client import HttpClient, HttpFailed
from ddtree.bench.measure import UnitRun
from ddtree.bench.plan import Load
from ddtree.bench.record import Cell, Unit, Variant
from ddtree.bench.workload import Problem
from ddtree.errors import UserError


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Files of a certificate for 127.0.0.1 that is its own authority, and of its key."""
    if not shutil.which("openssl"):
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


@pytest.fixture
def tls(certificate):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    return context


def test_tls(tls, certificate, monkeypatch):
    async def in_two_parts(head):
        yield STREAM + event("one ")
        await asyncio.sleep(0.05)
        yield event("two") + DONE

    monkeypatch.setattr(http_client, "_Now", None)  # times come from the socket here too
    with raw_server(in_two_parts, tls) as server:
        (answer,) = asked(server, scheme="https")
        assert answer.error_kind == "no_connection" and "certificate" in answer.error_text.lower()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        (answer,) = asked(server, scheme="https")
        assert answer.error_kind is None and answer.text == "one two" and 0 < answer.chunk_ms[0] < answer.end_ms


def named(monkeypatch, **proxies):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in proxies.items():
        monkeypatch.setenv(name, value)


def test_the_proxy_that_the_environment_names(monkeypatch):
    with raw_server(good) as proxy, raw_server(good) as server:
        for name in ("http_proxy", "ALL_PROXY"):
            named(monkeypatch, **{name: f"http://us:a%20word@127.0.0.1:{proxy.port}"})
            (answer,) = asked(server, proxy=True)
            assert answer.error_kind is None and not server.heads
            head = proxy.heads.pop().lower()
            assert head.startswith(b"post http://127.0.0.1:%d/v1/chat/completions " % server.port)
            assert b"proxy-authorization: basic dxm6ysb3b3jk\r\n" in head and b"authorization: bearer sk-" in head
        for proxies in ({"no_proxy": "127.0.0.1"}, {"no_proxy": "*"}):
            named(monkeypatch, http_proxy=f"http://127.0.0.1:{proxy.port}", **proxies)
            assert asked(server, proxy=True)[0].error_kind is None and server.heads.pop() and not proxy.heads
        named(monkeypatch, https_proxy=f"http://127.0.0.1:{proxy.port}")
        assert asked(server, proxy=True)[0].error_kind is None and server.heads.pop() and not proxy.heads


def test_a_proxy_that_is_not_to_be_had(monkeypatch):
    with raw_server(good) as proxy:
        pass
    named(monkeypatch, all_proxy=f"http://us:secret@127.0.0.1:{proxy.port}")
    (answer,) = asked(proxy, proxy=True)
    assert answer.error_kind == "no_connection" and "secret" not in answer.error_text
    named(monkeypatch, all_proxy="socks5://127.0.0.1:1")
    with pytest.raises(UserError, match="socks5"):
        asked(proxy, proxy=True)


@pytest.mark.parametrize(
    "proxy", ["http://us:secret@/x", "http://", "http://[::1", "us:secret@", "http://us:secret@h:port", "http://..:80"]
)
def test_a_proxy_that_is_no_address(monkeypatch, proxy):
    named(monkeypatch, http_proxy=proxy)
    with pytest.raises(UserError, match="a proxy that is no address") as refused:
        HttpClient("http://example.org", None, uses_proxies=True)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_certificates_that_cannot_be_read(monkeypatch, tmp_path, content):
    if content:
        (tmp_path / "cert.pem").write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    with pytest.raises(UserError, match="SSL_CERT_FILE"):
        HttpClient("https://example.org", None, uses_proxies=False)
    HttpClient("http://example.org", None, uses_proxies=False)  # which needs none


@pytest.mark.parametrize("key", ["sk-\x01", "a\nb", "\x7f", "half \ud800"])
def test_a_key_that_no_header_can_carry(key):
    with pytest.raises(UserError, match="API key"):
        HttpClient("http://example.org", key, uses_proxies=False)


def test_a_key_that_an_editor_began_with_a_mark():
    async def run(url):
        async with HttpClient(url, f"\ufeff{KEY}", uses_proxies=False) as client:
            return await ask(client, url, {}, 5.0, 1.0)

    with raw_server(good) as server:
        assert asyncio.run(run(f"http://127.0.0.1:{server.port}")).error_kind is None
        assert f"\r\nauthorization: bearer {KEY}\r\n".encode() in server.heads[0].lower()


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://..:80", "http://" + "a" * 64 + ".org", "http://h:0", "http:///x"]
)
def test_an_address_that_nothing_can_have(url):
    with pytest.raises(UserError, match="no server's address"):
        clean_url(url)
    assert clean_url("http://[::1]:80") and clean_url("http://" + "a" * 63 + ".org") and clean_url("HTTP://localhost.")


def test_tls_to_a_port_without_it():
    async def run(url):
        async with HttpClient(url, None, uses_proxies=False) as client:
            await client.get(url, 0.3)

    with raw_server(good) as server, pytest.raises(HttpFailed, match="see whether the port is one for https"):
        asyncio.run(run(f"https://127.0.0.1:{server.port}"))


def test_connections_are_there_before_a_unit_begins():
    """So that no handshake is in a slot's first TTFT; and a server that refuses the asking is measured all the same."""

    async def answering(head):
        if b"/v1/models " in head:
            await asyncio.sleep(0.1)
            yield b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"
        else:
            yield STREAM + event("x")
            await asyncio.sleep(0.05)
            yield DONE

    async def run(url):
        cell = Cell(workload="w", context_tokens=None, concurrency=6, temperature=0.0, variant=Variant())
        async with HttpClient(url, None, uses_proxies=False) as client:
            endpoint = Endpoint(url, client, "unknown", "m")
            unit = UnitRun(endpoint, Load(), Unit(cell=cell, repetition=0), "run", 1)
            await unit.measure([Problem(f"p{number}", ("question",)) for number in range(12)])

    with raw_server(answering) as server:
        asyncio.run(run(f"http://127.0.0.1:{server.port}"))
        assert [b"/v1/models " in head for head in server.heads] == [True] * 6 + [False] * 12
        assert server.connections == 6


def test_a_server_on_this_machine_needs_no_proxy(monkeypatch):
    with raw_server(good) as proxy, raw_server(good) as server:
        named(monkeypatch, http_proxy=f"http://127.0.0.1:{proxy.port}")

        async def run(url):
            async with make_client(url, None) as client:
                return await ask(client, url, {}, 5.0, 1.0)

        assert asyncio.run(run(f"http://127.0.0.1:{server.port}")).error_kind is None and not proxy.heads


def test_tls_through_a_proxy(tls, certificate, monkeypatch):
    """A tunnel; a proxy that refuses one is told without its password."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))

    async def tunnel(reader, writer):
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        if is_refused:
            writer.write(b"HTTP/1.1 403 No\r\ncontent-length: 0\r\n\r\n")
            return
        there, back = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    async def pipe(reader, writer):
        while data := await reader.read(2**16):
            writer.write(data)
        writer.close()

    async def run(user, scheme="https"):
        async with await asyncio.start_server(tunnel, "127.0.0.1", 0) as proxy:
            port = proxy.sockets[0].getsockname()[1]
            named(monkeypatch, https_proxy=f"http://{user}127.0.0.1:{port}")
            url = f"{scheme}://127.0.0.1:{server.port}"
            async with HttpClient(url, KEY, uses_proxies=True) as client:
                return await ask(client, url, {}, 5.0, 1.0)

    with raw_server(good, tls) as server:
        for user, told, scheme in (("", False, "https"), ("us:secret@", True, "https"), ("us:secret@", True, "HTTPS")):
            heads, is_refused = [], False
            answer = asyncio.run(run(user, scheme))
            assert answer.error_kind is None and answer.text == "one two"
            assert heads[0].startswith(b"CONNECT 127.0.0.1:") and KEY.encode() not in heads[0]
            assert (b"\r\nproxy-authorization: basic dxm6c2vjcmv0\r\n" in heads[0].lower()) == told
            assert (b"authorization" in heads[0].lower()) == told
            (inside,) = [server.heads.pop().lower() for _ in list(server.heads)]
            assert b"proxy-authorization" not in inside and b"\r\nauthorization: bearer " in inside
        is_refused = True
        answer = asyncio.run(run("us:secret@"))
    assert answer.error_kind == "broken_stream" and "403" in answer.error_text
    assert "secret" not in answer.error_text and KEY not in answer.error_text
