"""Does the engine itself answer each question? Numbers that nobody asked about before must show up in answers, usage
and counters, which stored answers cannot follow."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from ddtree.verify.answer import Answer, Order
from ddtree.verify.effective import Counters
from ddtree.verify.finding import Finding, proven, unknown, violated
from ddtree.verify.prompts import echo_text, fresh_number, long_text
from ddtree.verify.session import Session

_NUMBERS, _ROUNDS = 2, 4
_FEWEST_TOKENS, _MOST_TOKENS = 8, 24


def probe_answers(session: Session) -> Iterator[Finding]:
    """Raises CheckFailed."""
    adapter = session.adapter
    before = adapter.counters()
    answers: list[Answer] = []
    limits: list[int] = []
    # Some models give other numbers the same answer, or one that begins so and is cut off: seldom again and again.
    for _ in range(_ROUNDS):
        numbers = _numbers()
        limits += (most := [most_tokens() for _ in numbers])
        latest = [adapter.answer(Order(echo_text(n), limit)) for n, limit in zip(numbers, most, strict=True)]
        answers += latest
        alike = _likeness(numbers, latest)
        if True not in alike[False] or alike[True] == {False}:
            break
    limits.append(most_tokens())
    chat = adapter.answer(Order(f"Repeat this number: {fresh_number()}", limits[-1], is_chat=True))
    texts = [long_text(200), long_text(_longer_characters(session))]
    shorter, longer = (adapter.answer(Order(text, 1)) for text in texts)
    asked = [*answers, chat, shorter, longer]
    moved = session.moved_since(before, sum(answer.completion_tokens for answer in asked))
    if empty := [answer for answer in asked if answer.completion_tokens < 1]:
        yield violated(
            "answers",
            "every answer has tokens",
            f"{len(empty)} of {len(asked)} answers have none",
            remedy="ask the server the same by hand; look into its log",
        )
        return
    yield _follow(numbers, latest, alike, lambda: adapter.answer(Order(long_text(120), _MOST_TOKENS)))
    yield _usage([*answers, chat], limits, shorter, longer, len(texts[1]) / len(texts[0]))
    yield _counted(session, asked, moved)


def _numbers() -> list[str]:
    """Numbers that nobody asked about before, one of them twice at a random place."""
    numbers: list[str] = []
    while len(numbers) < _NUMBERS:
        if (number := fresh_number()) not in numbers:
            numbers.append(number)
    numbers.insert(secrets.randbelow(_NUMBERS + 1), secrets.choice(numbers))
    return numbers


def _likeness(numbers: Sequence[str], answers: Sequence[Answer]) -> dict[bool, set[bool]]:
    """Over all pairs: whether answers are alike, for the same number and for different ones."""
    alike: dict[bool, set[bool]] = {True: set(), False: set()}
    for (one, first), (other, second) in combinations(zip(numbers, answers, strict=True), 2):
        alike[one == other].add(_alike(first.text, second.text))
    return alike


def _follow(
    numbers: Sequence[str], answers: Sequence[Answer], alike: dict[bool, set[bool]], stranger: Callable[[], Answer]
) -> Finding:
    """``stranger`` asks with a text of another kind: some models answer all numbers alike, a store all texts.

    Args:
        alike: see `_likeness`.
    """
    claim = "answers follow from their questions"
    echoed = sum(number in answer.text for number, answer in zip(numbers, answers, strict=True))
    seen = (
        f"{echoed} of {len(answers)} answers repeat the number that was asked for",
        f"one question was asked twice: its answers are {'alike' if alike[True] == {True} else 'not alike'}; those to "
        f"the other are {'alike too' if True in alike[False] else 'others'}",
    )
    is_shuffled = True in alike[False] and alike[True] == {False}
    if not echoed and (is_shuffled or (alike[False] == {True} and _alike(stranger().text, answers[0].text))):
        return violated(
            "answers",
            claim,
            *seen,
            remedy="something answers from a store: ask the engine directly, not through a proxy or cache",
        )
    if echoed or (alike[True] == {True} and True not in alike[False]):
        return proven("answers", claim, *seen)
    return unknown("answers", claim, *seen, remedy="ask the server the same by hand", is_required=False)


def _alike(one: str, other: str) -> bool:
    """One may be cut off earlier than the other."""
    return one == other or bool(one and other and (one.startswith(other) or other.startswith(one)))


def most_tokens() -> int:
    """Drawn for each question: a stored answer may be longer."""
    return _FEWEST_TOKENS + secrets.randbelow(_MOST_TOKENS - _FEWEST_TOKENS + 1)


def _longer_characters(session: Session) -> int:
    """So many that they fit the context, were each a token of its own."""
    context = session.effective.settings.get("context_length")
    return min(1500, context - 64) if isinstance(context, int) else 1500


def _usage(answers: Sequence[Answer], limits: Sequence[int], shorter: Answer, longer: Answer, times: float) -> Finding:
    claim = "usage counts this prompt and this answer"
    told = [(answer.completion_tokens, most) for answer, most in zip(answers, limits, strict=True)]
    too_many = [tokens for tokens, most in told if tokens > most]
    seen = (
        f"prompts of {shorter.prompt_tokens} tokens, and of {longer.prompt_tokens} where the text is {times:.1f} times "
        "as long",
        f"answers of {', '.join(f'{tokens} (at most {most})' for tokens, most in told)} tokens",
    )
    is_short = longer.prompt_tokens < 0.6 * times * shorter.prompt_tokens
    if is_short or too_many or (shorter.completion_tokens, longer.completion_tokens) != (1, 1):
        return violated(
            "answers",
            claim,
            *seen,
            remedy="usage does not belong to these requests: ask the engine directly, not through a proxy or cache",
        )
    return proven("answers", claim, *seen)


def _counted(session: Session, asked: Sequence[Answer], moved: Counters) -> Finding:
    claim = "the engine's counters move with the answers"
    tokens = sum(answer.completion_tokens for answer in asked)
    if moved.completion_tokens is None:
        return unknown(
            "answers",
            claim,
            f"{session.effective.engine} tells no counter of generated tokens",
            remedy="start SGLang with --enable-metrics",
            is_required=False,
        )
    seen = f"usage tells {tokens} generated tokens, the counter moved by {moved.completion_tokens:g}"
    if moved.completion_tokens < tokens:
        return violated(
            "answers",
            claim,
            seen,
            remedy="another process generated these answers, or none did: ask the engine itself, one replica at a time",
        )
    return proven("answers", claim, seen)
