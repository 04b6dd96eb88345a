"""The official client against a live server: each feature, and that the answers are the engine's own."""

from __future__ import annotations

import asyncio

import openai
import pytest

from ddtree import SamplingParams, Speculation

CHAT = [{"role": "user", "content": "hello there"}]


def own(engine, params: SamplingParams, prompt=CHAT, speculation: Speculation | None = None):
    return engine.generate([prompt], params, speculation=speculation)[0]


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == 256
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_greedy_chat_is_the_engines_own(client, tiny_engine):
    answer = client.chat.completions.create(model="tiny", messages=CHAT, temperature=0, max_tokens=30)
    expected = own(tiny_engine, SamplingParams(max_new_tokens=30))
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, 30)
    assert usage.total_tokens == usage.prompt_tokens + 30
    stats = answer.model_extra["ddtree"]
    assert (stats["mode"], stats["budget"], stats["notes"]) == ("tree", 32, [])
    assert stats["accepted_lengths"] == expected.stats.accepted_lengths
    assert stats["rounds"] == expected.stats.rounds and stats["rounds_by_choice"] == [expected.stats.rounds]
    assert stats["tau"] == pytest.approx(expected.stats.tau, abs=1e-4)
    assert stats["ttft_ms"] > 0


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"temperature": 0.9, "seed": 7}, {"temperature": 0.9, "seed": 7}),
        ({"temperature": 1.3, "seed": 7, "top_p": 0.8}, {"temperature": 1.3, "seed": 7, "top_p": 0.8}),
        ({"seed": 7, "extra_body": {"top_k": 5}}, {"temperature": 1.0, "seed": 7, "top_k": 5}),
        ({"seed": 7, "extra_body": {"min_p": 0.2}}, {"temperature": 1.0, "seed": 7, "min_p": 0.2}),
        ({"temperature": 0, "presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"temperature": 0, "frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
        ({"temperature": 0, "extra_body": {"repetition_penalty": 1.8}}, {"repetition_penalty": 1.8}),
        ({"temperature": 0, "max_completion_tokens": 9}, {"max_new_tokens": 9}),
    ],
    ids=str,
)
def test_sampling_fields_reach_the_engine(client, tiny_engine, fields, params):
    fields = {"max_tokens": 24} | fields if "max_completion_tokens" not in fields else fields
    answer = client.chat.completions.create(model="tiny", messages=CHAT, **fields)
    expected = own(tiny_engine, SamplingParams(**{"max_new_tokens": 24} | params))
    assert answer.choices[0].message.content == expected.text
    plain = own(tiny_engine, SamplingParams(max_new_tokens=len(expected.token_ids)))
    assert answer.choices[0].message.content != plain.text or "max_completion_tokens" in fields


def test_without_a_seed_answers_differ_and_temperature_is_1(client):
    texts = {
        client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=24).choices[0].message.content
        for _ in range(4)
    }
    assert len(texts) == 4


def test_stop_strings_and_ids(client, tiny_engine):
    free = own(tiny_engine, SamplingParams(max_new_tokens=40))
    word = free.text[20:23]
    answer = client.chat.completions.create(model="tiny", messages=CHAT, temperature=0, max_tokens=40, stop=word)
    assert answer.choices[0].message.content == free.text[: free.text.index(word)]
    assert answer.choices[0].finish_reason == "stop"

    token = free.token_ids[10]
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_tokens=40, extra_body={"stop_token_ids": [token]}
    )
    assert answer.usage.completion_tokens == free.token_ids.index(token) + 1
    assert answer.choices[0].finish_reason == "stop"


def test_a_stop_string_over_several_chunks_never_shows(client, tiny_engine):
    free = own(tiny_engine, SamplingParams(max_new_tokens=60))
    word = free.text[15:27]
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_tokens=60, stop=[word, "never"], stream=True,
        extra_body={"ddtree": {"mode": "ar"}},
    )  # fmt: skip
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == free.text[: free.text.index(word)]


def test_n_choices_with_following_seeds(client, tiny_engine):
    answer = client.chat.completions.create(model="tiny", messages=CHAT, n=3, seed=40, max_tokens=12)
    for index, choice in enumerate(answer.choices):
        expected = own(tiny_engine, SamplingParams(max_new_tokens=12, temperature=1.0, seed=40 + index))
        assert (choice.index, choice.message.content) == (index, expected.text)
    assert answer.usage.completion_tokens == 36
    assert answer.usage.prompt_tokens == expected.prompt_tokens, "a prompt counts once"
    assert sum(answer.model_extra["ddtree"]["rounds_by_choice"]) == answer.model_extra["ddtree"]["rounds"]


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_chat_stream(client, tiny_engine, include_usage, n):
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = list(
        client.chat.completions.create(model="tiny", messages=CHAT, seed=3, max_tokens=25, n=n, stream=True, **options)
    )
    assert len({chunk.id for chunk in chunks}) == 1
    texts = [""] * n
    reasons = [None] * n
    for chunk in chunks:
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "nothing comes after a finish reason"
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    expected = [own(tiny_engine, SamplingParams(max_new_tokens=25, temperature=1.0, seed=3 + i)).text for i in range(n)]
    assert texts == expected and reasons == ["length"] * n
    assert "ddtree" in chunks[-1].model_extra
    assert not any("ddtree" in chunk.model_extra for chunk in chunks[:-1])
    if include_usage:
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 25 * n
        assert all(chunk.usage is None for chunk in chunks[:-1])
    else:
        assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("n", [1, 3])
def test_every_chunk_tells_the_tokens_so_far(client, tiny_engine, n):
    """As clients ask that count tokens by events, such as guidellm."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"messages": CHAT, "seed": 3, "max_tokens": 25, "n": n, "stream": True, "stream_options": options}
    chunks = list(client.chat.completions.create(model="tiny", **fields))
    prompt_tokens = own(tiny_engine, SamplingParams(max_new_tokens=1)).prompt_tokens
    texts, told = [""] * n, []
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        assert chunk.usage.prompt_tokens == prompt_tokens
        assert chunk.usage.total_tokens == prompt_tokens + chunk.usage.completion_tokens
        told.append((chunk.usage.completion_tokens, sum(len(tiny_engine.tokenizer.encode(text)) for text in texts)))
    assert told[0] == (0, 0) and told[-1][0] == chunks[-1].usage.completion_tokens == 25 * n
    assert all(tokens >= shown for tokens, shown in told), "what is shown has been counted"
    assert [tokens for tokens, _ in told] == sorted(tokens for tokens, _ in told)
    assert len({tokens for tokens, _ in told}) > 3, "it grows on the way"


def test_text_completions(client, tiny_engine):
    prompts = ["abc", "hello"]
    answer = client.completions.create(model="tiny", prompt=prompts, temperature=0, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [own(tiny_engine, SamplingParams(max_new_tokens=16), p) for p in prompts]
    assert [c.text for c in answer.choices] == [expected[0].text] * 2 + [expected[1].text] * 2
    assert answer.usage.prompt_tokens == sum(e.prompt_tokens for e in expected)
    assert answer.usage.completion_tokens == 64

    ids = tiny_engine.tokenizer.encode("abc")
    for prompt in (ids, [ids]):
        again = client.completions.create(model="tiny", prompt=prompt, temperature=0)
        assert again.choices[0].text == expected[0].text

    stream = client.completions.create(model="tiny", prompt="abc", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected[0].text


@pytest.mark.parametrize(
    "options", [{"mode": "ar"}, {"mode": "chain"}, {"mode": "tree", "budget": 5}, {"budget": 7}, {"budget": "auto"}]
)
def test_our_extension_picks_the_draft(client, tiny_engine, options):
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_tokens=20, extra_body={"ddtree": options}
    )
    stats = answer.model_extra["ddtree"]
    budget = options.get("budget", {"ar": 0, "chain": 5}.get(options.get("mode")))
    assert (stats["mode"], stats["budget"]) == (options.get("mode", "tree"), budget)
    assert answer.choices[0].message.content == own(tiny_engine, SamplingParams(max_new_tokens=20)).text
    assert len(stats["round_budgets"]) == stats["rounds"]
    assert set(stats["round_budgets"]) == {budget} or budget == "auto"
    if options.get("mode") == "ar":
        assert set(stats["accepted_lengths"]) == {1}


def test_an_async_client_with_many_at_once(server, tiny_engine):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(model="tiny", prompt="xyz"[: 1 + i % 3], seed=i, max_tokens=10 + i)
                    for i in range(16)
                )
            )
            return [answer.choices[0].text for answer in answers]

    expected = [
        own(tiny_engine, SamplingParams(max_new_tokens=10 + i, temperature=1.0, seed=i), "xyz"[: 1 + i % 3]).text
        for i in range(16)
    ]
    assert asyncio.run(ask()) == expected
    assert server.is_empty()


def test_content_in_parts_and_the_developer_role(client, tiny_engine):
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=8)
    plain = [{"role": "system", "content": "be kind"}, *CHAT]
    assert answer.choices[0].message.content == own(tiny_engine, SamplingParams(max_new_tokens=8), plain).text


def test_chat_logprobs_whole_and_in_a_stream(client, tiny_engine):
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=5, logprobs=3)
    expected = own(tiny_engine, params).logprobs
    asked = {"model": "tiny", "messages": CHAT, "seed": 5, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(**asked)
    chunks = client.chat.completions.create(**asked, stream=True)
    streamed = [t for c in chunks for choice in c.choices if choice.logprobs for t in choice.logprobs.content]
    for content in (answer.choices[0].logprobs.content, streamed):
        text = tiny_engine.tokenizer.token_text
        assert [t.token for t in content] == [text(e.token_id) for e in expected]
        assert [t.logprob for t in content] == pytest.approx([e.logprob for e in expected], abs=1e-4)
        assert [[o.token for o in t.top_logprobs] for t in content] == [[text(i) for i, _ in e.top] for e in expected]
        assert all(bytes(t.bytes).decode() == t.token for t in content)
    bare = client.chat.completions.create(**asked | {"top_logprobs": 0})
    assert all(t.top_logprobs == [] for t in bare.choices[0].logprobs.content)
    without = client.chat.completions.create(**{k: v for k, v in asked.items() if "logprobs" not in k})
    assert without.choices[0].logprobs is None


def test_completion_logprobs(client, tiny_engine):
    asked = {"model": "tiny", "prompt": "ab", "temperature": 0, "max_tokens": 12, "logprobs": 2}
    answer = client.completions.create(**asked)
    told = answer.choices[0].logprobs
    assert "".join(told.tokens) == answer.choices[0].text
    assert [answer.choices[0].text[at : at + 1] for at in told.text_offset] == told.tokens
    assert all(
        len(top) == 2 and top[token] == max(top.values())
        for token, top in zip(told.tokens, told.top_logprobs, strict=True)
    )
    assert told.token_logprobs == [top[token] for token, top in zip(told.tokens, told.top_logprobs, strict=True)]
    chunks = list(client.completions.create(**asked, stream=True))
    assert [t for chunk in chunks for t in chunk.choices[0].logprobs.tokens] == told.tokens
    assert [t for chunk in chunks for t in chunk.choices[0].logprobs.text_offset] == told.text_offset


def test_logit_bias(client, tiny_engine):
    free = own(tiny_engine, SamplingParams(max_new_tokens=20))
    banned = max(set(free.token_ids), key=free.token_ids.count)
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_tokens=20, logit_bias={str(banned): -100}
    )
    expected = own(tiny_engine, SamplingParams(max_new_tokens=20, logit_bias={banned: -100}))
    assert answer.choices[0].message.content == expected.text != free.text
