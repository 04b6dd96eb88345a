"""Formats of answers: kept on every path of a tree, the same text in every mode, and nobody else is held up by them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from ddtree import SamplingParams, Speculation
from ddtree.errors import UserError
from ddtree.server.grammar import GrammarCompiler

CHAT = [{"role": "user", "content": "hello there"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["big", "small"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
MODES = [{"mode": "ar"}, {"mode": "chain"}, {"mode": "tree", "budget": 24}, {"budget": "auto"}]


@pytest.fixture(scope="module")
def compiler(tiny_engine):
    return GrammarCompiler(tiny_engine)


def formatted(client, *, mode, temperature=0.0, schema=SCHEMA, **fields):
    return client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=150, temperature=temperature, seed=4,
        response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}},
        extra_body={"ddtree": mode}, **fields,
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.8])
def test_every_mode_writes_the_same_json_of_the_schema(client, temperature):
    texts = []
    for mode in MODES:
        answer = formatted(client, mode=mode, temperature=temperature)
        assert answer.choices[0].finish_reason == "stop"
        assert any("grammar" in note for note in answer.model_extra["ddtree"]["notes"])
        texts.append(answer.choices[0].message.content)
    assert len(set(texts)) == 1
    told = json.loads(texts[0])
    assert told.keys() == {"name", "size", "kind"}
    assert len(told["name"]) <= 8 and 0 <= told["size"] <= 99 and told["kind"] in ("big", "small")


def test_speculation_stays_on_under_a_grammar(client):
    stats = formatted(client, mode={"mode": "tree", "budget": 24}).model_extra["ddtree"]
    assert set(stats["round_budgets"]) == {24}


def test_any_json_object(client):
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=200, seed=1, response_format={"type": "json_object"}
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    assert answer.choices[0].message.content.lstrip().startswith("{")


def test_a_stream_in_a_format(client):
    whole = formatted(client, mode={"mode": "ar"}).choices[0].message.content
    chunks = list(formatted(client, mode={"budget": 24}, stream=True))
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == whole


def test_choices_and_others_beside_a_format(client, server, tiny_engine):
    """Split rounds run apart; plain requests at the same time get their own answers."""
    with ThreadPoolExecutor(6) as pool:
        formats = [pool.submit(formatted, client, mode=MODES[i % 4], temperature=1.0, n=2) for i in range(3)]
        plain = [
            pool.submit(client.completions.create, model="tiny", prompt="abc", seed=i, max_tokens=60) for i in range(3)
        ]
        choices = [[choice.message.content for choice in f.result().choices] for f in formats]
        assert choices[0] == choices[1] == choices[2] and choices[0][0] != choices[0][1]
        for i, answer in enumerate(plain):
            params = SamplingParams(max_new_tokens=60, temperature=1.0, seed=i)
            assert answer.result().choices[0].text == tiny_engine.generate(["abc"], params)[0].text
            assert answer.result().model_extra["ddtree"]["notes"] == []
    assert server.is_empty()


def test_logprobs_and_bias_under_a_grammar(client):
    answer = formatted(client, mode={"budget": 24}, logprobs=True, top_logprobs=2, logit_bias={"20": 5})
    told = answer.choices[0].logprobs.content
    assert "".join(t.token for t in told) == answer.choices[0].message.content
    assert any(t.logprob < t.top_logprobs[1].logprob for t in told), "they are the target's own, before the grammar"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}}, "json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "json_schema.name"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ],
    ids=str,
)
def test_formats_that_are_refused(http, fields, words):
    answer = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 4} | fields)
    assert answer.status_code == 400 and words in answer.text, answer.text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"type": "object", "not": {}},
        {"$ref": "http://example.org/schema"},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "(("},
        {"type": "string", "format": "no-such-format"},
        {"x-guidance": {"lenient": True}, "type": "object", "not": {}},
    ],
    ids=str,
)
def test_schemas_that_cannot_be_kept_are_refused(http, server, schema):
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 4, "response_format": asked})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "response_format"
    assert server.is_empty()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 100_000_000},
        {"type": "string", "pattern": "(a{1,1000}){1,1000}b"},
        {"allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}", "type": "string"} for n in range(10, 30)]},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}},
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_schemas_that_are_bombs_go_off_quietly(http, server, schema):
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    began = time.monotonic()
    answer = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 4, "response_format": asked})
    assert answer.status_code in (200, 400), answer.text
    assert time.monotonic() - began < 15 and len(answer.content) < 2000
    assert server.is_empty()


def test_a_schema_whose_lexer_never_ends_is_refused_by_the_probe(http):
    """The server's own compiler would keep a thread busy for ever with this one."""
    schema = {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 4, "response_format": asked})
    assert answer.status_code == 400
    assert "too long to compile" in answer.json()["error"]["message"]


def endless(n: int) -> dict:
    """A schema that the grammar library compiles for minutes."""
    return {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967 + 2 * n}]}


def test_schemas_that_compile_for_long_hold_up_nobody(server, http):
    """Beside two of them, another schema, plain requests and `/health` are answered as if they were not there."""

    def ask(schema, url=server.url):
        asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body = {"messages": CHAT, "max_tokens": 4, "response_format": asked}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        return answer, time.monotonic()

    ask({"type": "boolean"})  # the helpers and the table of tokens are there
    with ThreadPoolExecutor(4) as pool:
        slow = pool.submit(ask, endless(1))
        time.sleep(0.3)
        other, other_end = ask({"type": "integer", "maximum": 77})
        plain = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        health, healthy_end = http.get("/health"), time.monotonic()
        refusal, slow_end = slow.result()
    assert (other.status_code, plain.status_code, health.status_code) == (200, 200, 200)
    assert other_end < slow_end and healthy_end < slow_end, "they did not wait for it"
    assert refusal.status_code == 400 and "too long to compile" in refusal.json()["error"]["message"]
    began = time.monotonic()
    again, end = ask(endless(1))
    assert again.status_code == 400 and end - began < 0.5, "the refusal is remembered"


def test_too_many_schemas_at_once_are_refused_and_what_is_kept_is_bounded(tiny_engine, monkeypatch):
    from ddtree.server import grammar_store
    from ddtree.server.api_error import ApiError

    monkeypatch.setattr(grammar_store, "MOST_WAITING", 3)
    monkeypatch.setattr(grammar_store, "KEPT", 4)

    async def flood() -> tuple[list[object], int, int]:
        store = grammar_store.GrammarStore()
        try:
            first = [store.json_schema(tiny_engine, {"type": "integer", "maximum": n}) for n in (1, 1, 2, 3, 4)]
            ended = await asyncio.gather(*first, return_exceptions=True)
            for n in range(10, 16):
                await store.json_schema(tiny_engine, {"type": "integer", "maximum": n})
            return ended, len(store._known), len(store._under_way)
        finally:
            await store.close()

    ended, kept, under_way = asyncio.run(flood())
    assert [type(each).__name__ for each in ended] == ["Grammar"] * 4 + ["ApiError"]
    assert ended[0] is ended[1], "one compilation for two requests"
    assert isinstance(ended[4], ApiError) and ended[4].status_code == 429
    assert (kept, under_way) == (4, 0)


def test_a_busy_machine_does_not_condemn_a_schema(tiny_engine, monkeypatch):
    from ddtree.server import grammar_probe
    from ddtree.server.grammar_store import GrammarStore

    async def twice() -> None:
        store = GrammarStore()
        try:
            with monkeypatch.context() as hurry:
                hurry.setattr(grammar_probe, "TIME_LIMIT_S", 0.001)
                with pytest.raises(UserError, match="busy machine"):
                    await store.json_schema(tiny_engine, {"type": "boolean"})
            assert await store.json_schema(tiny_engine, {"type": "boolean"})
        finally:
            await store.close()

    asyncio.run(twice())


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}]
)
def test_a_schema_that_only_refers_to_itself_is_named(http, schema):
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 4, "response_format": asked})
    assert answer.status_code == 400
    assert "does a $ref lead back to itself?" in answer.json()["error"]["message"]


def test_masks_follow_each_path(compiler, tiny_engine):
    """Each row's mask is the one that its path alone would have."""
    words = compiler.compile('start: "ab" ("c" | "d") /[a-z]{3}/')
    encode = tiny_engine.tokenizer.encode
    a, b, c, d, x = (encode(letter)[0] for letter in "abcdx")
    end = 2  # a node that ends the answer has nothing below it
    tokens, parents = [0, a, b, b, c, x, d, c, end, a], [0, 0, 0, 1, 3, 3, 3, 2, 1, 8]
    state = words.start()
    bits = state.allowed(tokens, parents)

    def allows(row):
        return {token for token in range(99) if bits[row, token // 32] >> token % 32 & 1}

    letters = {encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz"}
    assert (allows(0), allows(1), allows(3), allows(4), allows(6)) == ({a}, {b}, {c, d}, letters, letters)
    for path in ([a], [a, b], [a, b, c]):
        alone = words.start()
        for token in path:
            alone.advance(token)
        row = {1: 1, 2: 3, 3: 4}[len(path)]
        assert np.array_equal(alone.allowed([0], [0])[0], bits[row])
    assert np.array_equal(state.allowed(tokens, parents), bits), "looking ahead leaves no trace"


def test_a_grammar_that_ends_ends_the_answer(compiler, tiny_engine):
    words = compiler.compile("start: /[a-c]{2}[0-9]{3}/")
    for speculation in (Speculation("ar"), Speculation("tree", 16)):
        for temperature in (0.0, 1.5):
            sequence = tiny_engine.submit(
                [5, 6], SamplingParams(max_new_tokens=40, temperature=temperature, seed=1, top_p=0.9),
                speculation=speculation, constraint=words.start(),
            )  # fmt: skip
            while sequence.finish_reason is None:
                tiny_engine.step()
            assert re.fullmatch("[a-c]{2}[0-9]{3}", sequence.text) and sequence.finish_reason == "stop"


def test_a_bad_grammar_is_the_users_error(compiler):
    with pytest.raises(UserError, match="cannot be used"):
        compiler.compile("start: (")


def test_a_grammar_that_comes_to_a_dead_end_fails_alone(compiler, server, tiny_engine):
    """The model has no token for what must come next."""
    engine, ended = tiny_engine, compiler.compile(r'start: "ab" "\n" "a"').start()
    params = SamplingParams(max_new_tokens=40)
    free = engine.submit([5, 6], params, speculation=Speculation("tree", 16))
    bound = engine.submit([5, 6], params, speculation=Speculation("tree", 16), constraint=ended)
    while free.finish_reason is None or bound.finish_reason is None:
        engine.step()
    assert ended.fault and "\n" not in ended.fault
    assert free.output == engine.generate([[5, 6]], params)[0].token_ids
