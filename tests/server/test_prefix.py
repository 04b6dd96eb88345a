"""The prefix cache as clients and operators see it."""

from __future__ import annotations

import httpx
import pytest
from live import Live, live, tiny_loader

PROMPT = "the quick brown fox jumps over the lazy dog again and again and again"  # 69 tokens
CACHED = 64


@pytest.fixture(scope="module")
def warm_server(tiny_folders):
    with live(tiny_loader(tiny_folders, prefix_cache=True)) as server:
        yield server


def ask(server: Live, **fields) -> dict:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0} | fields
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_usage_and_metrics_tell_what_was_found(warm_server, http):
    cold = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 20, "temperature": 0}).json()
    first, again = ask(warm_server), ask(warm_server)
    assert (cached(first), cached(again)) == (0, CACHED)
    assert first["choices"][0]["text"] == again["choices"][0]["text"] == cold["choices"][0]["text"]
    assert first["ddtree"]["accepted_lengths"] == again["ddtree"]["accepted_lengths"], "trap 5"
    assert first["ddtree"]["accepted_lengths"] == cold["ddtree"]["accepted_lengths"]
    assert warm_server.metric("ddtree_cached_prompt_tokens_total") == CACHED
    facts = httpx.get(f"{warm_server.url}/server_info").json()
    told = facts["effective"]["engine"]["prefix_cache"]
    assert told["hit_tokens"] == CACHED and told["prompt_tokens"] >= 138
    assert warm_server.metric("ddtree_prefix_cache_tokens") == told["tokens"] == facts["occupancy"]["prefix_tokens"]
    assert warm_server.is_empty(), "what is kept is not in use"


def test_a_prompt_counts_once(warm_server):
    answer = ask(warm_server, prompt=[PROMPT, "quite another one"], n=3)
    assert cached(answer) == CACHED and answer["usage"]["prompt_tokens"] == 69 + 17


def test_sampling_penalties_and_logprobs_are_those_of_the_cold_way(warm_server, http):
    fields = {"temperature": 1.1, "seed": 9, "repetition_penalty": 1.5, "presence_penalty": 1, "logprobs": 2}
    ask(warm_server)
    warm = ask(warm_server, **fields)
    cold = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 20} | fields).json()
    assert cached(warm) == CACHED and cached(cold) == 0
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    ours, theirs = (each["choices"][0]["logprobs"] for each in (warm, cold))
    assert ours["tokens"] == theirs["tokens"]
    assert ours["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-4)


def test_a_conversation_finds_its_own_answers(warm_server):
    talk = [{"role": "user", "content": "hello there, how are you today?"}]
    found = []
    for _ in range(3):
        body = {"messages": talk, "max_tokens": 30, "temperature": 0}
        answer = httpx.post(f"{warm_server.url}/v1/chat/completions", json=body, timeout=30).json()
        found.append(cached(answer))
        talk += [answer["choices"][0]["message"], {"role": "user", "content": "and now?"}]
    assert found[0] == 0 and found[1] >= 32 and found[2] > found[1] + 16


def test_without_it_nothing_is_found(http, server):
    for _ in range(2):
        answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}).json()
        assert cached(answer) == 0
    facts = http.get("/server_info").json()
    assert facts["effective"]["engine"]["prefix_cache"] is None
    assert server.metric("ddtree_prefix_cache_tokens") == 0
