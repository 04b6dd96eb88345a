"""The official client against a server of the real pair, in the order of the features that it offers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import openai
import pytest

QUESTION = "What is the capital of France? Answer in one sentence."
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24}


@pytest.fixture
def client(real_server):
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_greedy_answers_are_those_of_the_command(client, target_folder):
    from ddtree.demo import drafter_folder

    flags = {
        "--model": target_folder, "--draft": drafter_folder(), "--dtype": "float32", "--max-model-len": 512,
        "--max-new-tokens": 24, "--budget": 16, "--prompt": QUESTION,
    }  # fmt: skip
    command = [sys.executable, "-m", "ddtree", "generate", "--json", *(str(w) for pair in flags.items() for w in pair)]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout)
    whole = client.chat.completions.create(**CHAT, temperature=0)
    chunks = list(client.chat.completions.create(**CHAT, temperature=0, stream=True))
    text = whole.choices[0].message.content
    assert text == "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text in json.dumps(told, ensure_ascii=False) and "Paris" in text


def test_sync_async_and_streams_with_every_kind_of_field(client, real_server):
    fields = {
        "temperature": 0.8, "top_p": 0.9, "seed": 7, "n": 2, "stop": ["\n\n"], "presence_penalty": 0.3,
        "frequency_penalty": 0.2, "logit_bias": {"100": -20}, "logprobs": True, "top_logprobs": 3,
        "extra_body": {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.05, "ddtree": {"budget": 8}},
    }  # fmt: skip
    whole = client.chat.completions.create(**CHAT, **fields)
    texts = [choice.message.content for choice in whole.choices]
    assert len(texts) == 2 and all(len(choice.logprobs.content) >= 1 for choice in whole.choices)
    assert whole.model_extra["ddtree"]["budget"] == 8 and whole.model_extra["ddtree"]["tau"] >= 1

    streamed, usage = ["", ""], None
    chunks = client.chat.completions.create(**CHAT, **fields, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts and usage.completion_tokens == whole.usage.completion_tokens

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{real_server.url}/v1", api_key="none", timeout=120) as several:
            answer = await several.chat.completions.create(**CHAT, **fields)
            return [choice.message.content for choice in answer.choices]

    assert asyncio.run(ask()) == texts


def test_formats_and_refusals(client):
    schema = {
        "type": "object", "required": ["city"], "additionalProperties": False,
        "properties": {"city": {"type": "string", "maxLength": 20}},
    }  # fmt: skip
    format_ = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(**CHAT, temperature=0, response_format=format_)
    assert json.loads(answer.choices[0].message.content).keys() == {"city"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**CHAT, temperature=-1)
    assert caught.value.body["param"] == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
