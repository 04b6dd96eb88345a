"""How fast a running SGLang server answers, asked over its OpenAI interface: the measure behind ``budget auto``."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
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


def measure_server(url: str, concurrencies: Iterable[int], timeout_s: float = 120) -> dict[int, float]:
    """Tokens a second of all requests together, by concurrency; the better of two passes each.

    Args:
        url: where the server listens, without a path.

    Raises:
        OSError: it does not answer.
    """
    _ask(url, QUESTIONS[0], timeout_s)
    return {c: max(_pass(url, c, timeout_s), _pass(url, c, timeout_s)) for c in concurrencies}


def _pass(url: str, concurrency: int, timeout_s: float) -> float:
    questions = QUESTIONS * max(1, -(-2 * concurrency // len(QUESTIONS)))
    begun = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        tokens = sum(pool.map(lambda question: _ask(url, question, timeout_s), questions))
    return round(tokens / (time.perf_counter() - begun), 1)


def _ask(url: str, question: str, timeout_s: float) -> int:
    body = {
        "model": "default", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": TOKENS,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        told: dict[str, Any] = json.loads(reply.read())
    return int(told["usage"]["completion_tokens"])
