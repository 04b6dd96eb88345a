"""The three questions that the demo asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoPrompt:
    """A short name for tables and the user's turn."""

    name: str
    text: str


PROMPTS = (
    DemoPrompt(
        "maths",
        "A farmer has 15 apples. She gives 6 apples to her neighbour and then picks 4 more. How many apples does she "
        "have now? Work it out step by step.",
    ),
    DemoPrompt(
        "code",
        "Write a Python function that returns the sum of the even numbers in a list. Add a docstring and an example.",
    ),
    DemoPrompt("chat", "Why is the sky blue? Explain it to a ten-year-old in a few sentences."),
)
