"""What is too large or too slow is refused before it costs much."""

from __future__ import annotations

import socket

import httpx
import pytest
from live import live, raw_request, tiny_loader
from refusal import refused


def test_large_bodies(tiny_folders):
    with live(tiny_loader(tiny_folders), max_body_bytes=2000) as server:
        big = b'{"prompt": "' + b"x" * 5000 + b'"}'
        json_type = {"Content-Type": "application/json"}
        assert refused(httpx.post(f"{server.url}/v1/completions", content=big, headers=json_type), 413, "2000 bytes")

        def in_chunks():
            for _ in range(100):
                yield b"x" * 100

        assert refused(httpx.post(f"{server.url}/v1/completions", content=in_chunks(), headers=json_type), 413)
        fits = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "a"}', headers=json_type)
        assert fits.status_code == 200


def test_a_client_that_sends_slowly_is_told_so(tiny_folders):
    slow = live(tiny_loader(tiny_folders), client_timeout_s=0.3)
    with slow as server, socket.create_connection(server.address, timeout=10) as line:
        line.sendall(raw_request(b"{", content_length=50))
        assert line.recv(4096).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("text", ["hello there ", "a\n", "a", " ", "1"], ids=repr)
def test_prompts_of_megabytes_are_refused_for_their_beginning(http, tiny_engine, monkeypatch, text):
    """The work of a refusal is bounded by the context, not by the text."""
    looked_at = []
    own = type(tiny_engine.tokenizer)._ids
    monkeypatch.setattr(
        type(tiny_engine.tokenizer), "_ids",
        lambda self, told, is_chat: looked_at.append(len(told)) or own(self, told, is_chat),
    )  # fmt: skip
    long = (text * 2**21)[: 2**21]
    raw = http.post("/v1/completions", json={"prompt": long})
    chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": long}]})
    assert refused(raw, 400, "shorten", param="prompt") and refused(chat, 400, "shorten", param="messages")
    assert {answer.json()["error"]["code"] for answer in (raw, chat)} == {"context_length_exceeded"}
    assert max(looked_at) < 2**14
    assert refused(http.post("/v1/completions", json={"prompt": [5] * 300}), 400, "300 tokens")
    assert refused(http.post("/tokenize", json={"text": long}), 400, param="text")


def test_whatever_fits_is_never_refused_for_its_beginning(tiny_engine):
    """Texts of many characters a token are looked at as a whole."""
    encode = tiny_engine.tokenizer.encode
    for text in ("<s>" * 240, "ab<s>" * 70, "a" * 255):
        assert encode(text, context=256) == encode(text)


def test_lists_have_an_end(http):
    """Pieces of no text cost more than their text."""
    empty = [{"role": "user", "content": ""}] * 2049
    assert refused(http.post("/v1/chat/completions", json={"messages": empty}), 400, "2048", param="messages")
    parts = [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]
    assert refused(http.post("/v1/chat/completions", json={"messages": parts}), 400, "1024")
    assert refused(http.post("/detokenize", json={"tokens": [5] * (2**18 + 1)}), 400, param="tokens")
