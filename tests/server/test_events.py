"""Events of a stream: pieces of text put together from parts, and what a client that is behind gets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from live import Live

from ddtree import SamplingParams, Speculation
from ddtree.server.answer_format import ChatFormat, CompletionFormat
from ddtree.server.answer_response import AnswerResponse
from ddtree.server.events import TextEvents, event
from ddtree.server.job import Delta
from ddtree.server.plan import Plan
from ddtree.server.service import Work

TEXTS = [
    "a",
    ' "quoted" \\ and\n\ttabbed\r',
    "naïve 日本語 🙂",
    "half \ud83d of one",
    "\u2028\x00\x1f</script>",
    "data: x\n\n",
]


@pytest.mark.parametrize("dress", [ChatFormat("m", None, False), CompletionFormat('a "model" \\', None, False)])
@pytest.mark.parametrize("more", [{}, {"usage": None}])
def test_a_text_event_is_what_the_format_says(dress, more):
    events = TextEvents(dress, more)
    for index in (0, 3, 0):
        for text in TEXTS:
            (choice,) = dress.pieces(index, Delta(text, [1], []))
            told = events.of(index, text)
            assert told == event(dress.body([choice], is_chunk=True) | more)
            assert told.startswith(b"data: {") and told.endswith(b"}\n\n") and told.count(b"\n") == 2
            json.loads(told[6:])


def test_only_plain_answers_are_plain():
    assert ChatFormat("m", None, False).is_plain and CompletionFormat("m", None, False).is_plain
    assert not ChatFormat("m", None, True).is_plain and not CompletionFormat("m", None, True).is_plain
    assert not ChatFormat("m", None, False, may_call=True).is_plain


def pieces(server: Live, prompts: list[str], slow_s: float) -> list[bytes]:
    """Bodies of a stream's messages, to a client that takes so long for each."""
    engine = server.service.thread.engine
    works = [
        Work(engine.tokenizer.encode(text), SamplingParams(max_new_tokens=60, seed=1), Speculation("ar"))
        for text in prompts
    ]
    plan = Plan(works, [len(work.prompt) for work in works], stream=True, include_usage=True)
    bodies: list[bytes] = []

    async def answer() -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

        async def send(message: Any) -> None:
            bodies.append(message.get("body", b""))
            await asyncio.sleep(slow_s)

        dress = CompletionFormat("tiny", engine.tokenizer, False)
        await AnswerResponse(server.service, plan, dress)({"type": "http"}, receive, send)

    asyncio.run_coroutine_threadsafe(answer(), server.service.thread._loop).result(60)
    return [body for body in bodies if body]


def text_of(bodies: list[bytes]) -> tuple[dict[int, str], int]:
    """Texts by choice, and how many events there were."""
    events = [json.loads(each[6:]) for each in b"".join(bodies).split(b"\n\n") if each.startswith(b"data: {")]
    texts: dict[int, str] = {}
    for told in events:
        for choice in told["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert events[-1]["usage"]["completion_tokens"] == 60 * len(texts)
    return texts, len(events)


def test_a_client_that_is_behind_gets_what_piled_up_in_one_event(server: Live):
    quick, slow = pieces(server, ["abc"], 0.0), pieces(server, ["abc"], 0.03)
    (told, n_quick), (told_slowly, n_slow) = text_of(quick), text_of(slow)
    assert told == told_slowly and n_slow < n_quick / 2


def test_what_a_round_brings_to_the_choices_of_a_request_goes_at_once(server: Live):
    bodies = pieces(server, ["abc", "abd", "abe"], 0.0)
    texts, events = text_of(bodies)
    assert len(texts) == 3 and len(bodies) < events / 2
