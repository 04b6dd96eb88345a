"""How fast a running SGLang server answers, asked over its OpenAI interface: the measure behind ``budget auto``."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

QUESTIONS = (
    "Write a Python function that merges two sorted lists into one.",
    "A train covers 180 km in 2 hours and then 120 km in 1.5 hours. What is its average speed?",
    "Explain in a few sentences why the sky is blue.",
    "Write a Python class for a bank account with deposit, withdraw and balance.",
    "List the steps of making a cup of tea.",
    "Anna has 14 apples, gives away a third of the rest after eating 2, and buys 5. How many has she?",
    "Summarise what a hash table is and when it is slow.",
    "Write a SQL query for the three customers with the highest total of orders.",
)
TOKENS = 128
PASSES = 5
"""Of each concurrency, for every width as many: medians of other counts are not alike."""


def measure_server(url: str, concurrencies: Iterable[int], timeout_s: float = 120) -> dict[int, float]:
    """Tokens a second while so many requests run at once, by concurrency.

    Rounds of small models wait for the host, whose slow moments would decide between widths. So every question is asked
    in several passes and its median time counts, not the time of a pass.

    Args:
        url: where the server listens, without a path.

    Raises:
        OSError: it does not answer.
    """
    _ask(url, QUESTIONS[0], timeout_s)
    return {c: _speed(url, c, timeout_s) for c in concurrencies}


def _speed(url: str, concurrency: int, timeout_s: float) -> float:
    passes = [_pass(url, concurrency, timeout_s) for _ in range(PASSES)]
    by_question = list(zip(*passes, strict=True))
    tokens = sum(median(tokens for tokens, _ in answers) for answers in by_question)
    seconds = sum(median(seconds for _, seconds in answers) for answers in by_question)
    return round(concurrency * tokens / seconds, 1)


def _pass(url: str, concurrency: int, timeout_s: float) -> list[tuple[int, float]]:
    """Tokens and seconds of every answer, ``concurrency`` of them at a time; at least two a place."""
    questions = QUESTIONS * max(1, -(-2 * concurrency // len(QUESTIONS)))
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda question: _ask(url, question, timeout_s), questions))


def _ask(url: str, question: str, timeout_s: float) -> tuple[int, float]:
    body = {
        "model": "default", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": TOKENS,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begun = time.perf_counter()
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        told: dict[str, Any] = json.loads(reply.read())
    return int(told["usage"]["completion_tokens"]), time.perf_counter() - begun
