"""The questions that probes ask: our own, short, and of kinds that drafters draft well and badly."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from ddtree.verify.answer import Order


@dataclass(frozen=True)
class ProbePrompt:
    """A short name for reports, and the text."""

    name: str
    text: str
    is_chat: bool


SPECULATION = (
    ProbePrompt("count", "Write the whole numbers from 1 to 40, separated by commas, and nothing else.", True),
    ProbePrompt(
        "function",
        "Write a Python function `mean(values)` that returns the arithmetic mean of a list of numbers, with a "
        "docstring and two doctests.",
        True,
    ),
    ProbePrompt(
        "sum",
        "A train has 7 coaches with 48 seats each, and 29 seats are taken. How many seats are free? Explain each step.",
        True,
    ),
    ProbePrompt("explain", "Explain to a pupil why a boat of steel floats on water.", True),
    ProbePrompt(
        "code",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
        "        self.items.append(item)\n\n    def pop(self):\n",
        False,
    ),
    ProbePrompt("list", "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,", False),
)

FINGERPRINT = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at a temperature of",
)
"""Never with a number in them that changes: the same model says the same."""

_FILLER = (
    "The lighthouse keeper wrote the weather into a book each evening. On some days there was fog over the bay, and "
    "the horn sounded twice a minute until morning. Ships came from the north with timber, and left with salt and "
    "dried fish. In spring the painter renewed the white of the tower, and the glass of the lamp was polished. "
)


def fresh_number() -> str:
    """Five digits that nobody has asked about before; they go into a prompt so that no stored answer fits it."""
    return str(10_000 + secrets.randbelow(90_000))


def speculation_orders(max_tokens: int) -> list[Order]:
    """The fixed set, each with a number of its own."""
    return [
        Order(
            f"{prompt.text} (Order {fresh_number()}.)" if prompt.is_chat else f"# {fresh_number()}\n{prompt.text}",
            max_tokens,
            is_chat=prompt.is_chat,
        )
        for prompt in SPECULATION
    ]


def echo_text(number: str) -> str:
    """Bare text whose likeliest continuation is ``number``."""
    return (
        "code 31744 is written 31744\ncode 90215 is written 90215\ncode 57803 is written 57803\n"
        f"code {number} is written"
    )


def long_text(characters: int) -> str:
    """About so many characters of prose with a number at the head, so that no cached prefix fits."""
    head = f"Log {fresh_number()}.\n"
    rest = max(0, characters - len(head))
    return head + (_FILLER * (rest // len(_FILLER) + 1))[:rest] + "\nThe lighthouse keeper"
