"""What a server must say no to: each refusal a 4xx in OpenAI's shape that names the field."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from live import live, tiny_loader
from refusal import refused

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"audio": {}}, "audio"),
        ({"functions": []}, "functions"),
        ({"user": "me"}, "user"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"echo": False}, "echo"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 16.0}, "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**30}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"n": 50}, "n"),  # more than slots and queue hold
        ({"stop": ""}, "stop[0]"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids[0]"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"ddtree": {"mode": "forest"}}, "ddtree.mode"),
        ({"ddtree": {"budget": 0}}, "ddtree.budget"),
        ({"ddtree": {"budget": 1025}}, "ddtree.budget"),
        ({"ddtree": {"mode": "ar", "budget": 4}}, "ddtree.budget"),
        ({"ddtree": {"mode": "chain", "budget": 9}}, "ddtree.budget"),
        ({"ddtree": {"speed": 9}}, "ddtree.speed"),
        ({"store": True}, "store"),
        ({"store": 0}, "store"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"99": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1, "5": 2}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "hi", "name": "me"}]}, "messages[0].name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_chat_fields(http, fields, param):
    assert refused(http.post("/v1/chat/completions", json=CHAT | fields), 400, param=param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, True]}, "prompt[0]"),
        ({"prompt": [1, 99]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**20]}, "prompt"),
        ({"prompt": "x" * 300}, "prompt"),
        ({"prompt": ["x"] * 33, "n": 2}, "n"),
        ({"echo": True}, "echo"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"echo": 0}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"messages": []}, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_completion_fields(http, fields, param):
    assert refused(http.post("/v1/completions", json={"prompt": "a"} | fields), 400, param=param)


def test_a_prompt_beyond_the_context_has_openais_code(http):
    answer = http.post("/v1/completions", json={"prompt": "x" * 300})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "300 tokens, the context 256" in answer.json()["error"]["message"]


def test_null_means_left_out(http):
    names = ("temperature", "top_p", "stop", "n", "seed", "stream", "stream_options", "ddtree", "max_completion_tokens")
    names = (*names, "store", "service_tier", "response_format", "chat_template_kwargs", "logprobs", "model")
    answer = http.post("/v1/chat/completions", json=CHAT | dict.fromkeys(names))
    assert answer.status_code == 200, answer.text


def test_values_that_ask_for_nothing_are_let_through(http):
    fields = {"store": False, "service_tier": "auto", "logprobs": False, "response_format": {"type": "text"}}
    assert http.post("/v1/chat/completions", json=CHAT | fields).status_code == 200
    fields = {"prompt": "a", "echo": False, "best_of": 1, "suffix": None}
    assert http.post("/v1/completions", json=fields).status_code == 200


def test_another_model_is_404(http):
    assert refused(http.post("/v1/chat/completions", json=CHAT | {"model": "gpt"}), 404, "gpt", "tiny", param="model")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", ["not JSON"]),
        (b"{", ["not JSON"]),
        (b"[]", ["not a JSON object"]),
        (b"null", ["not a JSON object"]),
        (b'{"messages": [}', ["not JSON"]),
        (b'{"a": "\xff\xfe"}', ["not UTF-8", "byte 7"]),
        (b"\xff", ["not UTF-8"]),
        (b'{"\\ud800": 1}', ["surrogate"]),
        (b'{"messages": [{"role": "user", "content": "\\udfff"}]}', ["surrogate"]),
        (b'{"temperature": NaN}', ["NaN"]),
        (b'{"temperature": -Infinity}', ["-Infinity"]),
        (b'{"seed": ' + b"9" * 5000 + b"}", ["too long"]),
        (b'{"n": 1, "n": 2}', ["n: this field is given twice"]),
        (b"[" * 100_000, ["too deeply"]),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, ["too deeply"]),
        (b"{" + b",".join(b'"f%d": 1' % i for i in range(5000)) + b"}", ["more than 1024 fields"]),
        (json.dumps({"stop_token_ids": ["x"] * 200_000}).encode(), ["stop_token_ids"]),
        (json.dumps({"messages": [{}] * 200_000}).encode(), ["messages[0]"]),
        (json.dumps(CHAT | {"x" * 100_000: 1}).encode(), ["xxx"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bodies_that_are_none(http, body, words):
    began = time.monotonic()
    response = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert refused(response, 400, *words)
    assert time.monotonic() - began < 5


def test_exponents_beyond_floats(http):
    assert refused(_raw(http, b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}'), 400)


def _raw(http, body):
    return http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_only_json_is_read(http, kind):
    """Also what keeps web pages of other origins out: a browser sends these types without asking."""
    headers = {"Content-Type": kind} if kind else {}
    assert refused(http.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers), 415)


def test_unknown_paths_and_methods(http):
    assert refused(http.get("/v2/none"), 404)
    assert refused(http.get("/v1/chat/completions"), 405)
    assert refused(http.post("/health"), 405)
    assert refused(http.get("/v1/models/..%2f..%2fetc%2fpasswd"), 404)
    assert refused(http.get("/health/", follow_redirects=False), 404), "no redirect to the client's Host"
    assert http.get("/docs").status_code == 404, "its page would load scripts from elsewhere"


@pytest.mark.parametrize("host", ["elsewhere.example", "127.0.0.1.elsewhere.example:80", "[::2]:80", "10.0.0.1", "a:b"])
def test_a_name_that_leads_here_from_elsewhere_is_refused(http, host):
    """A web page may have its own name lead to 127.0.0.1, and would then be of one origin with this server."""
    for path in ("/status", "/v1/models", "/metrics"):
        assert refused(http.get(path, headers={"Host": host}), 403, "--insecure")
    assert refused(http.post("/v1/chat/completions", json=CHAT, headers={"Host": host}), 403)
    assert http.get("/ready", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["localhost:9", "127.0.0.1", "[::1]:80", "LOCALHOST", "localhost."])
def test_names_of_this_machine_are_answered(http, host):
    assert http.get("/v1/models", headers={"Host": host}).status_code == 200


def test_tokens_there_and_back(http, tiny_engine):
    ids = tiny_engine.tokenizer.encode("hello")
    assert http.post("/tokenize", json={"text": "hello"}).json() == {
        "tokens": ids, "count": len(ids), "max_model_len": 256,
    }  # fmt: skip
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"text": "hello"}
    chat = http.post("/tokenize", json={"messages": CHAT["messages"]}).json()["tokens"]
    assert chat == tiny_engine.tokenizer.encode_chat(CHAT["messages"])
    assert http.post("/tokenize", json={"text": ""}).json()["tokens"] == []
    assert refused(http.post("/tokenize", json={}), 400, param="text")
    assert refused(http.post("/tokenize", json={"text": "a", "messages": CHAT["messages"]}), 400, param="text")
    assert refused(http.post("/detokenize", json={"tokens": [99]}), 400, param="tokens")
    assert refused(http.post("/detokenize", json={"tokens": [1.0]}), 400, param="tokens[0]")


def test_keys(tiny_folders, tmp_path):
    from ddtree.server import read_api_keys

    file = tmp_path / "keys"
    file.write_text("# mine\nfirst-secret-key\n\nsecond-secret-key\n")
    with live(tiny_loader(tiny_folders), api_keys=read_api_keys(file)) as server:

        def ask(path, **headers):
            return httpx.get(server.url + path, headers=headers)

        for path in ("/health", "/ready", "/"):
            assert ask(path).status_code == 200
        for path in ("/v1/models", "/metrics", "/server_info", "/status", "/openapi.json", "/nothing"):
            assert refused(ask(path), 401, "Bearer")
            assert refused(ask(path, Authorization="Bearer first-secret-ke"), 401)
            assert refused(ask(path, Authorization="Basic first-secret-key"), 401)
            assert ask(path, Authorization="Bearer second-secret-key").status_code == (
                404 if path == "/nothing" else 200
            )
        assert refused(httpx.post(f"{server.url}/v1/chat/completions", content=b"x" * 10), 401)
        key = {"Authorization": "Bearer first-secret-key"}
        assert "secret" not in ask("/server_info", **key).text, "keys are not told"
        assert ask("/server_info", **key).json()["requested"]["server"]["api_keys"] == 2
