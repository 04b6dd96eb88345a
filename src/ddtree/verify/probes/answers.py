"""Does the engine itself answer each question? Numbers that nobody asked about before must show up in answers, usage
and counters, which stored answers cannot follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddtree.verify.answer import Answer, Order
from ddtree.verify.effective import Counters
from ddtree.verify.finding import Finding, proven, unknown, violated
from ddtree.verify.prompts import echo_text, fresh_number, long_text
from ddtree.verify.session import Session

_NUMBERS = 3
_TOKENS = 12


def probe_answers(session: Session) -> Iterator[Finding]:
    """Raises CheckFailed."""
    adapter = session.adapter
    numbers: list[str] = []
    while len(numbers) < _NUMBERS:
        if (number := fresh_number()) not in numbers:
            numbers.append(number)
    before = adapter.counters()
    answers = [adapter.answer(Order(echo_text(number), _TOKENS)) for number in numbers]
    chat = adapter.answer(Order(f"Repeat this number: {fresh_number()}", _TOKENS, is_chat=True))
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
    yield _follow(numbers, answers)
    yield _usage([*answers, chat], shorter, longer, len(texts[1]) / len(texts[0]))
    yield _counted(session, asked, moved)


def _follow(numbers: Sequence[str], answers: Sequence[Answer]) -> Finding:
    claim = "answers follow from their questions"
    echoed = sum(number in answer.text for number, answer in zip(numbers, answers, strict=True))
    texts = {answer.text for answer in answers}
    seen = f"{len(texts)} different answers to {len(answers)} questions that differ in a number; {echoed} repeat it"
    if len(texts) == 1 and not echoed:
        return violated(
            "answers",
            claim,
            seen,
            remedy="something answers from a store: ask the engine directly, not through a proxy or cache",
        )
    return proven("answers", claim, seen)


def _longer_characters(session: Session) -> int:
    """So many that they fit the context, were each a token of its own."""
    context = session.effective.settings.get("context_length")
    return min(1500, context - 64) if isinstance(context, int) else 1500


def _usage(answers: Sequence[Answer], shorter: Answer, longer: Answer, times: float) -> Finding:
    claim = "usage counts this prompt and this answer"
    too_many = [answer for answer in answers if answer.completion_tokens > _TOKENS]
    seen = (
        f"prompts of {shorter.prompt_tokens} tokens, and of {longer.prompt_tokens} where the text is {times:.1f} times "
        "as long",
        f"answers of at most {max(answer.completion_tokens for answer in answers)} of {_TOKENS} tokens",
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
