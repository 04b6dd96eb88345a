"""Files of prompts: JSON Lines, one prompt a row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddtree.errors import UserError

OnBadRow = Literal["skip", "refuse"]
_FORMS = '{"turns": ["..."]}, {"messages": [{"role": "user", "content": "..."}]} or {"prompt": "..."}'


@dataclass(frozen=True)
class PromptRow:
    """One prompt.

    Attributes:
        row: number of its line, counted from 1.
        messages: what comes before the answer; the last one is the user's. Of several `turns` this is the first: later
            ones refer to answers that another model gave.
        text: all that the row says, later turns included.
    """

    file: Path
    row: int
    messages: tuple[Mapping[str, str], ...]
    text: str

    @property
    def first_turn(self) -> str:
        """The user's first message."""
        return next(m["content"] for m in self.messages if m["role"] == "user")


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and why."""

    file: Path
    row: int
    fault: str

    def __str__(self) -> str:
        return f"{self.file.name}, row {self.row}: {self.fault}"


def read_prompt_file(file: Path) -> Iterator[PromptRow | BadRow]:
    """Rows of a file in order; empty lines are passed over.

    Raises:
        UserError: the file cannot be read, or has no rows.
    """
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {file} ({error.strerror or error})", "give a JSON Lines file") from error
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"{file} is empty", f"write one object a line: {_FORMS}")
    for number, line in rows:
        try:
            messages, text = _read(line)
            yield PromptRow(file, number, messages, text)
        except _BadRowError as error:
            yield BadRow(file, number, str(error))


def refuse(bad: BadRow) -> UserError:
    """The error for a bad row where none may be skipped."""
    return UserError(str(bad), "correct or remove the row, or skip such rows with --on-bad-row skip")


class _BadRowError(Exception):
    """What is wrong with a row."""


Messages = tuple[Mapping[str, str], ...]


def _read(line: bytes) -> tuple[Messages, str]:
    """The messages to answer, and all text of the row."""
    try:
        content: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRowError(f"not UTF-8 (byte {error.start + 1})") from None
    except (ValueError, RecursionError) as error:
        raise _BadRowError(f"not JSON ({error})") from None
    given = next((name for name in _READERS if isinstance(content, dict) and name in content), None)
    if given is None:
        raise _BadRowError("neither turns, messages nor prompt")
    messages = _READERS[given](content[given])
    for message in messages:
        if not message["content"].strip():
            raise _BadRowError(f"{given} holds an empty text")
        if any("\ud800" <= character <= "\udfff" for character in message["content"]):
            raise _BadRowError(f"{given} holds half of a character")
    text = "\n".join(message["content"] for message in messages)
    return (messages[:1] if given == "turns" else messages), text


def _from_turns(turns: Any) -> Messages:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise _BadRowError("turns is no list of texts")
    return tuple({"role": "user", "content": turn} for turn in turns)


def _from_messages(messages: Any) -> Messages:
    """Up to the last message of the user: the answer to it is what the target is asked for."""
    is_list = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not is_list:
        raise _BadRowError("messages is no list of objects with role and content")
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    if not users:
        raise _BadRowError("messages has none of the user")
    return tuple({"role": m["role"], "content": m["content"]} for m in messages[: users[-1] + 1])


def _from_prompt(prompt: Any) -> Messages:
    if not isinstance(prompt, str):
        raise _BadRowError("prompt is no text")
    return ({"role": "user", "content": prompt},)


# Where a row has several, as benchmarks do that keep their bare prompt beside the turns, the first one counts.
_READERS = {"turns": _from_turns, "messages": _from_messages, "prompt": _from_prompt}
