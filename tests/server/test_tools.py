"""Tools: calls in form, whole and streamed, as the official client reads them, and refusals where there are none."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from live import live, tiny_loader
from llguidance import LLMatcher
from tool_models import smollm2_with_tools, tiny_tool_folders

from ddtree import Engine, Speculation
from ddtree.errors import UserError
from ddtree.server.grammar import GrammarCompiler
from ddtree.server.tool_call_stream import ToolCallStream
from ddtree.server.tools import Tool, tool_grammar, why_no_tools

CHAT = [{"role": "user", "content": "hello there"}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"the {name}", "parameters": schema}}


WEATHER = tool("get_weather", city={"type": "string", "maxLength": 9}, days={"type": "integer", "maximum": 99})
CLOCK = {"type": "function", "function": {"name": "clock"}}
MODES = [{"mode": "ar"}, {"mode": "chain"}, {"mode": "tree", "budget": 24}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_tool_folders(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="module")
def tool_server(folders):
    with live(tiny_loader(folders, max_model_len=1024), max_queue=40) as running:
        yield running


@pytest.fixture
def tool_client(tool_server):
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, mode: dict[str, Any] = MODES[2], **fields: Any) -> Any:
    fields = {"tools": [WEATHER, CLOCK], "temperature": 1.2, "seed": 5, "max_tokens": 250, "messages": CHAT} | fields
    return client.chat.completions.create(model="tiny", extra_body={"ddtree": mode}, **fields)


def is_weather(arguments: str) -> bool:
    told = json.loads(arguments)
    return told.keys() == {"city", "days"} and len(told["city"]) <= 9 and told["days"] <= 99


def test_a_named_function_is_called_in_every_mode(tool_client):
    named = {"type": "function", "function": {"name": "get_weather"}}
    calls = set()
    for mode in MODES:
        answer = ask(tool_client, mode, tool_choice=named)
        choice = answer.choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert call.type == "function" and call.function.name == "get_weather" and call.id.startswith("call_")
        assert is_weather(call.function.arguments)
        assert any("grammar" in note for note in answer.model_extra["ddtree"]["notes"])
        assert set(answer.model_extra["ddtree"]["round_budgets"]) <= {0, 5, 24}
        calls.add(call.function.arguments)
    assert len(calls) == 1


def test_a_call_is_required_and_may_be_one_only(tool_client):
    names = set()
    for seed in range(6):
        answer = ask(tool_client, tool_choice="required", parallel_tool_calls=False, seed=seed)
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert is_weather(call.function.arguments) if call.function.name == "get_weather" else call.function.arguments
        if call.function.name == "clock":
            assert json.loads(call.function.arguments) == {}, "no parameters: no arguments"
        names.add(call.function.name)
    assert names == {"get_weather", "clock"}


def test_several_calls_may_be_made(tool_client):
    counts = []
    for seed in range(5):
        choice = ask(tool_client, tool_choice="required", seed=seed).choices[0]
        calls = choice.message.tool_calls
        assert len({call.id for call in calls}) == len(calls)
        for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:  # the last one may be cut
            told = call.function
            assert json.loads(told.arguments) == {} if told.name == "clock" else is_weather(told.arguments)
        counts.append(len(calls))
    assert max(counts) > 1


@pytest.mark.parametrize("parallel", [True, False])
def test_a_stream_of_calls_is_the_whole_answer_in_pieces(tool_client, parallel):
    fields = {"tool_choice": "required", "parallel_tool_calls": parallel, "n": 2}
    whole = ask(tool_client, **fields)
    chunks = list(ask(tool_client, {"mode": "ar"}, stream=True, stream_options={"include_usage": True}, **fields))
    calls: dict[tuple[int, int], list[str]] = {}
    reasons = {}
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in reasons
            assert not choice.delta.content
            for piece in choice.delta.tool_calls or ():
                if piece.id:
                    assert piece.type == "function" and piece.function.arguments == ""
                    calls[choice.index, piece.index] = [piece.function.name, ""]
                else:
                    calls[choice.index, piece.index][1] += piece.function.arguments
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    expected = {
        (choice.index, i): [call.function.name, call.function.arguments]
        for choice in whole.choices
        for i, call in enumerate(choice.message.tool_calls)
    }
    assert calls == expected
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 10, "arguments come as they are written"


def test_auto_leaves_the_text_alone(tool_client):
    """The tools are in the prompt, and nothing else changes: the same text in every mode, and no call."""
    free = ask(tool_client, tool_choice="none", messages=CHAT, max_tokens=30)
    answers = [ask(tool_client, mode, max_tokens=30).choices[0] for mode in MODES]
    assert all(choice.finish_reason == "length" and choice.message.tool_calls is None for choice in answers)
    assert len({choice.message.content for choice in answers}) == 1
    assert free.choices[0].message.content != answers[0].message.content, "with none, the model is told of no tools"
    told = ask(tool_client, tool_choice="auto", max_tokens=1).usage.prompt_tokens
    assert told > free.usage.prompt_tokens + 100
    stream = ask(tool_client, max_tokens=30, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == answers[0].message.content


def test_tools_beside_plain_requests(tool_client, tool_server):
    with ThreadPoolExecutor(6) as pool:
        named = {"type": "function", "function": {"name": "clock"}}
        calls = [pool.submit(ask, tool_client, tool_choice=named) for _ in range(3)]
        plain = [
            pool.submit(tool_client.completions.create, model="tiny", prompt="abc", seed=1, max_tokens=40)
            for _ in range(3)
        ]
        assert all(len(call.result().choices[0].message.tool_calls) == 1 for call in calls)
        assert len({answer.result().choices[0].text for answer in plain}) == 1
    assert tool_server.is_empty()


def test_a_conversation_with_calls_goes_into_the_template(tool_client, tool_server, folders):
    first = ask(tool_client, tool_choice={"type": "function", "function": {"name": "clock"}}).choices[0].message
    answer = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "noon"}
    again = ask(tool_client, messages=[*CHAT, first, answer, {"role": "user", "content": "and?"}], max_tokens=4)
    assert again.choices[0].message.content
    tokenizer = tool_server.service.thread.engine.tokenizer
    body = {
        "messages": [
            *CHAT, first.model_dump(exclude_none=True), answer | {"content": [{"type": "text", "text": "noon"}]},
        ],
        "tools": [CLOCK],
    }  # fmt: skip
    tokens = httpx.post(f"{tool_server.url}/tokenize", json=body).json()["tokens"]
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call></s>' in text
    assert "<s>tool\nnoon</s>" in text and '"name": "clock"' in text.split("hello there")[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]}, "tools"),
        ({"tools": [tool("a", x={"type": "nonsense"})]}, "tools"),
        ({"tools": [tool("a", x={"type": "string", "format": "no-such"})]}, "tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"tools": None, "parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"name": "none_such"}}}, "tool_choice"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"chat_template_kwargs": {"tools": [CLOCK]}}, "chat_template_kwargs.tools"),
        ({"messages": [*CHAT, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [*CHAT, {"role": "tool", "content": "x", "tool_call_id": "c"}]}, "messages[1].tool_call_id"),
        ({"messages": [*CHAT, {"role": "assistant"}]}, "messages[1].content"),
        ({"messages": [*CHAT, {"role": "assistant", "tool_calls": []}]}, "messages[1].tool_calls"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        (
            {"messages": [*CHAT, {"role": "assistant", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]}]},
            "messages",
        ),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_refusals(tool_server, fields, param):
    body = {"messages": CHAT, "tools": [WEATHER], "max_tokens": 4} | fields
    answer = httpx.post(f"{tool_server.url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_a_model_without_tools_says_so(http):
    for fields in ({}, {"tool_choice": "required"}):
        answer = http.post("/v1/chat/completions", json={"messages": CHAT, "tools": [CLOCK]} | fields)
        assert answer.status_code == 400 and "chat template has no tools" in answer.text
    talk = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]  # fmt: skip
    answer = http.post("/v1/chat/completions", json={"messages": talk})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
    unused = {"messages": CHAT, "tools": [CLOCK], "tool_choice": "none", "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=unused).status_code == 200


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages }}", "has no tools"),
        ("{{ tools }} {\"name\": f, \"parameters\": {}}", "another form"),
        ("{{ tools }} <tool_call><function=f>\"arguments\"", "another form"),
        ("{{ tools }} <tool_call>{\"arguments\"}", "special token"),
    ],
)  # fmt: skip
def test_templates_of_other_forms(template, reason):
    variables = frozenset({"tools"} if "tools" in template else ())
    fake = SimpleNamespace(
        chat_template=template, template_variables=variables, encode=lambda t: [1], decode=lambda i: ""
    )
    assert reason in why_no_tools(fake)


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str, bool]], bool, list[Any]]:
    stream, deltas = ToolCallStream(), []
    for i, piece in enumerate(pieces):
        deltas += stream.push(piece, is_last=i == len(pieces) - 1)
    return stream.content, [(c.name, c.arguments, c.is_whole) for c in stream.calls], stream.is_whole, deltas


ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a}</tool_call>", "days": {}\n}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls", "is_whole"),
    [
        ("just < text <tool", "just < text <tool", [], False),
        ("", "", [], False),
        (ONE, "", [("get_weather", '{"city": "a}</tool_call>", "days": {}\n}', True)], True),
        ("hm\n" + TWO + "\n" + TWO, "hm\n", [("clock", "{}", True)] * 2, True),
        (TWO + "\n" + TWO[:30], "", [("clock", "{}", True)], False),
        ("x" + TWO[:-3], "x", [("clock", "{}", False)], False),
        ("x" + TWO[:-13], "x", [("clock", "{}}", False)], False),
        (ONE[:70], "", [("get_weather", '{"city": "a}</tool_ca', False)], False),
        (ONE[:20], "", [], False),
    ],
)  # fmt: skip
def test_calls_are_read_alike_however_the_text_is_cut(text, content, calls, is_whole):
    dice = random.Random(3)
    for _ in range(60):
        cuts = sorted(dice.choices(range(len(text) + 1), k=dice.randrange(12)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        got = read(pieces)
        assert got[:3] == (content, calls, is_whole), pieces
        assert "".join(delta.get("content", "") for delta in got[3]) == content
        told: list[str] = []
        for delta in got[3]:
            for each in delta.get("tool_calls", ()):
                if "id" in each:
                    told.append("")
                told[each["index"]] += each["function"]["arguments"]
        assert told == [arguments for _, arguments, _ in calls]


def accepts(compiler: GrammarCompiler, tokenizer: Any, grammar: str, text: str) -> bool:
    matcher = compiler.compile(grammar)._matcher.deep_copy()
    ids = tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_the_grammar(tool_server):
    engine = tool_server.service.thread.engine
    compiler = GrammarCompiler(engine)
    tools = [Tool.model_validate(each) for each in (WEATHER, CLOCK)]
    good = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "days": 3}}\n</tool_call>'
    spaced = '<tool_call>\n{"name": "get_weather", "arguments": {\n "city" : "Ulm", "days":3 }}\n</tool_call>'
    wrong = [
        good.replace("days", "nights"), good.replace("get_weather", "clock"), good.replace("3", '"3"'),
        good.replace("</tool_call>", ""), good + good, good + "\nbye", good.replace("get_weather", "other"),
    ]  # fmt: skip
    table = {
        (False, True): ["hi", "", good, spaced, "hi\n" + good, good + "\n" + TWO, "a <tool_call b"],
        (False, False): ["hi", good, "hi\n" + TWO],
        (True, True): [good, spaced, good + "\n" + TWO],
        (True, False): [good, spaced, TWO],
    }
    every = {text for texts in table.values() for text in texts}
    for (must_call, several), right in table.items():
        grammar = tool_grammar(tools, must_call=must_call, several=several)
        assert LLMatcher.validate_grammar(grammar) == ""
        for text in every | set(wrong):
            expected = text in right or (text in ("", "a <tool_call b", spaced) and not must_call and text != spaced)
            expected = expected or (text == spaced) or (not must_call and text in ("hi\n" + good, "hi\n" + TWO))
            expected = expected or (text == TWO)
            assert accepts(compiler, engine.tokenizer, grammar, text) == expected, (must_call, several, text)
    with pytest.raises(UserError, match="not of type object"):
        bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
        tool_grammar([Tool.model_validate(bad)], must_call=True, several=True)


def test_the_real_target_calls_a_tool_by_itself(target_folder, tmp_path):
    """SmolLM2 was not trained on tools; two turns before show it how. What it then writes is kept in form."""
    from ddtree.demo import drafter_folder

    folder = smollm2_with_tools(tmp_path / "smollm2", target_folder)

    def load(tell):
        return Engine.load(
            folder, drafter_folder(), dtype="float32", max_model_len=768, max_batch=2, prefix_cache=True,
            speculation=Speculation("tree", 16), on_progress=tell,
        )  # fmt: skip

    weather = tool("get_weather", city={"type": "string", "maxLength": 20})
    talk: list[dict[str, Any]] = []
    for i, city in enumerate(("Paris", "Rome")):
        called = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        talk += [
            {"role": "user", "content": f"What is the weather in {city}?"},
            {"role": "assistant", "tool_calls": [{"id": f"c{i}", "type": "function", "function": called}]},
            {"role": "tool", "content": "sunny", "tool_call_id": f"c{i}"},
            {"role": "assistant", "content": f"It is sunny in {city}."},
        ]
    talk.append({"role": "user", "content": "What is the weather in Madrid?"})
    body = {"messages": talk, "tools": [weather], "temperature": 0, "max_tokens": 60}
    with live(load) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=100).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls", answer
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Madrid"}
    assert answer["ddtree"]["tau"] > 1.5
