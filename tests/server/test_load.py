"""Many requests at once, good ones and bad ones: right answers for the good, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading

import httpx
import pytest
from live import live

from ddtree import SamplingParams, Speculation

FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 9999}}}
DRAFTS = [{"mode": "ar"}, {"mode": "chain"}, {"mode": "tree", "budget": 9}, {"mode": "tree", "budget": 40}, {}]


def good(i: int) -> dict:
    """A request with an answer that can be told beforehand."""
    sampling = [{"temperature": 0}, {"temperature": 1.1, "top_p": 0.9}, {"presence_penalty": 1, "temperature": 0.7}]
    return {
        "prompt": "abcdefgh"[i % 8] * (1 + i % 30), "seed": i, "max_tokens": 3 + i % 40, "ddtree": DRAFTS[i % 5],
        **sampling[i % 3], **({"logit_bias": {str(4 + i % 20): -50}} if i % 4 == 0 else {}),
    }  # fmt: skip


def expected(engine, i: int) -> str:
    fields = good(i)
    params = SamplingParams(
        max_new_tokens=fields["max_tokens"], seed=i, temperature=fields["temperature"], top_p=fields.get("top_p", 1.0),
        presence_penalty=fields.get("presence_penalty", 0.0),
        logit_bias={int(token): bias for token, bias in fields.get("logit_bias", {}).items()},
    )  # fmt: skip
    return engine.generate([fields["prompt"]], params, speculation=Speculation("ar"))[0].text


async def bad(client: httpx.AsyncClient, i: int) -> None:
    """Something that a server must live through."""
    path, kind = "/v1/completions", i % 6
    if kind == 0:
        assert (await client.post(path, content=b"{" * i)).status_code in (400, 415)
    elif kind == 1:
        assert (await client.post(path, json={"prompt": "x" * 5000})).status_code == 400
    elif kind == 2:
        assert (await client.post(path, json={"prompt": "a", "stop": [""], "stream": True})).status_code == 400
    elif kind == 3:  # leaves in the middle of a stream
        body = {"prompt": "a", "max_tokens": 200, "stream": True, "n": 2}
        async with client.stream("POST", path, json=body) as response:
            async for _ in response.aiter_lines():
                break
    elif kind == 4:  # leaves while it waits
        with pytest.raises(httpx.ReadTimeout):
            await client.post(path, json={"prompt": "a", "max_tokens": 200, "ddtree": {"mode": "ar"}}, timeout=0.02)
    else:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20, "response_format": FORMAT}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        json.loads(answer["choices"][0]["message"]["content"])


async def whole(client: httpx.AsyncClient, i: int) -> str:
    answer = await client.post("/v1/completions", json=good(i))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] <= good(i)["max_tokens"]
    return answer.json()["choices"][0]["text"]


async def streamed(client: httpx.AsyncClient, i: int) -> str:
    body = good(i) | {"stream": True, "stream_options": {"include_usage": True}}
    text, reasons, last = "", [], {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))
                for choice in last["choices"]:
                    text += choice["text"]
                    reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(reasons) == 1 and last["usage"]["completion_tokens"] <= body["max_tokens"]
    return text


def test_a_mixed_crowd(tiny_folders, tiny_engine):
    from live import tiny_loader

    numbers = list(range(120))
    random.Random(5).shuffle(numbers)

    async def crowd(url: str) -> dict[int, str]:
        limits = httpx.Limits(max_connections=24)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            turn, texts = asyncio.Semaphore(24), {}

            async def one(i: int) -> None:
                async with turn:
                    if i % 3 == 0:
                        await bad(client, i // 3)
                    else:
                        texts[i] = await (whole if i % 2 else streamed)(client, i)

            await asyncio.gather(*(one(i) for i in numbers))
            return texts

    with live(tiny_loader(tiny_folders, prefill_tokens=11), max_queue=64) as server:
        before = len(asyncio.all_tasks(server.service.thread._loop)), threading.active_count()
        texts = asyncio.run(crowd(server.url))
        assert len(texts) == 80
        for i, text in texts.items():
            assert text == expected(tiny_engine, i), i
        assert server.is_empty()
        gc.collect()
        after = len(asyncio.all_tasks(server.service.thread._loop)), threading.active_count()
        assert after[0] <= before[0] + 1 and after[1] <= before[1] + 8  # a pool's threads stay
        assert server.metric("ddtree_failed_steps_total") == 0
        assert server.metric("ddtree_requests_total", status="500") == 0


VALUES = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, 1e-40, 0.5, 0.011, 99, 10**40, "", "a", "auto", "none", "🙂",
    "\x00", [], [1], [[]], [[1, 2]], ["a"], {}, {"a": 1}, {"type": "text"}, {"type": "json_object"}, {"mode": "ar"},
    {"budget": 3}, {"5": 1}, {"include_usage": True}, [{"role": "user", "content": "hi"}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], [{"role": "assistant", "content": ""}],
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}},
]  # fmt: skip


def test_random_bodies_are_answered_or_refused(server):
    """Whatever comes in whichever field: an answer or a refusal, never a fault."""
    from ddtree.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

    dice, statuses = random.Random(11), []
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(150):
            path, model, base = dice.choice(
                [
                    ("/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
                    ("/v1/completions", CompletionRequest, {"prompt": "a"}),
                    ("/tokenize", TokenizeRequest, {"text": "a"}),
                    ("/detokenize", DetokenizeRequest, {"tokens": [5]}),
                ]
            )
            limit = {"max_tokens": 3} if "v1" in path else {}
            fields = {
                name: dice.choice(VALUES) for name in dice.sample(sorted(model.model_fields), dice.choice((1, 1, 2)))
            }
            body = base | limit | fields
            response = client.post(path, json=body)
            statuses.append(response.status_code)
            assert response.status_code in (200, 400, 404), (path, body, response.text)
            if response.status_code == 200 and body.get("stream"):
                assert response.text.rstrip().endswith("data: [DONE]"), (path, body, response.text)
            elif response.status_code != 200:
                assert response.json()["error"]["message"], (path, body)
    assert statuses.count(200) > 5 and statuses.count(400) > 30
    assert server.is_empty()


def test_the_real_pair_answers_as_without_a_server(real_server, real_engine, prompts):
    async def ask() -> list[dict]:
        async with httpx.AsyncClient(base_url=real_server.url, timeout=120) as client:
            bodies = [
                {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 24}
                for prompt in prompts[:3]
            ]
            answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
            return [answer.json() for answer in answers]

    answers = asyncio.run(ask())
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts[:3]]
    alone = [real_engine.generate([chat], SamplingParams(max_new_tokens=24))[0] for chat in chats]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == [done.text for done in alone]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [done.prompt_tokens for done in alone]
    rounds = sum(answer["ddtree"]["rounds"] for answer in answers)
    assert sum(sum(answer["ddtree"]["accepted_lengths"]) for answer in answers) / rounds > 2.5


def test_characters_of_several_tokens_are_never_cut(real_server):
    """Emoji are split over tokens; whatever piece they come in, the text is whole."""
    body = {
        "messages": [{"role": "user", "content": "Repeat exactly: 🙂🎉🚀 naïve 日本語"}], "temperature": 0,
        "max_tokens": 24, "stream": True, "ddtree": {"mode": "ar"},
    }  # fmt: skip
    with httpx.stream("POST", f"{real_server.url}/v1/chat/completions", json=body, timeout=60) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    pieces = [choice["delta"].get("content", "") for event in events for choice in event["choices"]]
    whole_text = httpx.post(f"{real_server.url}/v1/chat/completions", json=body | {"stream": False}, timeout=60).json()[
        "choices"
    ][0]["message"]["content"]
    assert "".join(pieces) == whole_text
    assert all("\ufffd" not in piece for piece in pieces[:-1])


def test_json_of_the_real_pair(real_server):
    schema = {
        "type": "object", "required": ["name", "age"], "additionalProperties": False,
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    }  # fmt: skip
    texts = set()
    for mode in ("ar", "tree"):
        body = {
            "messages": [{"role": "user", "content": "Describe a person as JSON."}], "seed": 3, "max_tokens": 60,
            "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
            "ddtree": {"mode": mode},
        }  # fmt: skip
        answer = httpx.post(f"{real_server.url}/v1/chat/completions", json=body, timeout=100).json()
        texts.add(answer["choices"][0]["message"]["content"])
    assert len(texts) == 1
    told = json.loads(texts.pop())
    assert told.keys() == {"name", "age"} and len(told["name"]) <= 12 and told["age"] <= 120
