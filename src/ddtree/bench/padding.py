"""Prompts of a chosen length: real text in front of a question, as much as the context asks for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from ddtree.bench.workload import Problem
from ddtree.errors import UserError

_ROUNDS = 16
_SUFFIXES = {".txt", ".md", ".rst", ".py"}


class PadText:
    """Real text to fill contexts with; every prompt starts at another place, so that no two share a prefix."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __len__(self) -> int:
        return len(self._text)

    def piece(self, start: int, characters: int) -> str:
        """``characters`` of it from ``start``, going on at the front after the end."""
        start %= len(self._text)
        return (self._text[start:] + self._text[:start])[:characters]


def read_pad_text(path: Path) -> PadText:
    """A text file, or the text files of a folder in the order of their names."""
    try:
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES) if path.is_dir() else [path]
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})", "give --pad-text a text file or folder") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text", "give --pad-text a text file or folder") from error
    if not text.strip():
        raise UserError(
            f"{path} holds no text", f"give --pad-text a file, or a folder of {', '.join(sorted(_SUFFIXES))}"
        )
    return PadText(text)


def pad_text_of(problems: tuple[Problem, ...]) -> PadText:
    """The workload's own prompts, one after the other."""
    return PadText("\n\n".join("\n".join(problem.turns) for problem in problems))


async def pad(
    problem: Problem,
    index: int,
    context_tokens: int,
    text: PadText,
    count: Callable[[str], Awaitable[int]],
) -> Problem:
    """``problem`` with text in front of its first turn, at most ``context_tokens`` long as the server counts.

    The length is within 2 % of ``context_tokens`` (or 8 tokens), from below.

    Args:
        index: of the problem in its workload; chooses where in ``text`` its piece begins.
        count: tokens of a conversation with this one user turn, template included.

    Raises:
        UserError: the question alone is longer, or there is not enough text.
    """
    question = problem.turns[0]
    bare = await count(question)
    if bare > context_tokens:
        raise UserError(
            f"{problem.id} alone has {bare} tokens, more than a context of {context_tokens}", "ask for a longer context"
        )
    slack = max(8, context_tokens // 50)
    if bare >= context_tokens - slack:
        return problem
    start, aim = index * 7919, context_tokens - slack // 2
    fits, too_long = (0, bare), (len(text) + 1, 0)  # characters and tokens; nothing is known to be too long yet
    guess = min(len(text), (context_tokens - bare) * 3)
    for turn in range(_ROUNDS):
        filled = _joined(text.piece(start, guess), question)
        tokens = await count(filled)
        if context_tokens - slack <= tokens <= context_tokens:
            return Problem(problem.id, (filled, *problem.turns[1:]), problem.fields)
        if tokens > context_tokens:
            too_long = guess, tokens
        elif guess == len(text):
            break
        else:
            fits = guess, tokens
        # Text may be far denser here than there, so lines between what is known come near, and halves come closer.
        if too_long[1] and turn % 2:
            guess = (fits[0] + too_long[0]) // 2
        elif too_long[1]:
            guess = fits[0] + (too_long[0] - fits[0]) * (aim - fits[1]) // (too_long[1] - fits[1])
        else:
            guess = guess * (aim - bare) // max(1, tokens - bare)
        guess = min(max(guess, fits[0] + 1), too_long[0] - 1)
    raise UserError(
        f"there is too little text to fill a context of {context_tokens} tokens (it has {len(text)} characters)",
        "give more of it with --pad-text",
    )


def _joined(piece: str, question: str) -> str:
    return f"{piece}\n\n---\n\n{question}"
