"""The prompts of a ``generate`` run: user turns, one after the other, each answered before the next is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree.errors import UserError


@dataclass
class Conversation:
    """The user's turns, and the messages so far (rendered by the model's chat template)."""

    turns: list[str]
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, turn: int, chat: bool) -> str | list[dict[str, str]]:
        """What the engine gets for ``turn``: the messages up to it, or the bare text without ``chat``."""
        if not chat:
            return self.turns[turn]
        self.messages.append({"role": "user", "content": self.turns[turn]})
        return list(self.messages)

    def answer(self, text: str) -> None:
        """Note the model's answer, which later turns refer to."""
        self.messages.append({"role": "assistant", "content": text})


def read_conversations(prompts: list[str], file: Path | None, chat: bool) -> list[Conversation]:
    """From ``--prompt`` texts or from a ``--prompts`` file with one JSON object a line, its turns in ``turns``."""
    if prompts and file is not None:
        raise UserError("--prompt and --prompts contradict each other", "give one of them")
    if file is None:
        if not prompts:
            raise UserError("nothing to generate from", "give --prompt TEXT or --prompts FILE.jsonl")
        if not all(prompts):
            raise UserError("--prompt is empty", "give it some text")
        if not all(map(_is_unicode, prompts)):
            raise UserError("--prompt is not valid Unicode text", "give it in UTF-8")
        return [Conversation([prompt]) for prompt in prompts]
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"cannot read {file} ({error.strerror})", "give --prompts a JSONL file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text", "give --prompts a JSONL file") from error
    found = [_read_line(f"{file}, line {number}", line, chat) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f"{file} holds no prompts", 'write one object a line, such as {"turns": ["Hello!"]}')
    return found


def _read_line(place: str, line: str, chat: bool) -> Conversation:
    remedy = 'write it as {"turns": ["Hello!"]}'
    try:
        content: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not JSON ({error.msg} at column {error.colno})", remedy) from error
    except RecursionError as error:
        raise UserError(f"{place} is nested too deeply", remedy) from error
    except ValueError as error:  # a number with thousands of digits
        raise UserError(f"{place} is not JSON ({error})", remedy) from error
    turns = content.get("turns") if isinstance(content, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise UserError(f"{place} has no 'turns' list of non-empty texts", remedy)
    if not all(map(_is_unicode, turns)):
        raise UserError(f"{place} is not valid Unicode text", "write characters whole, without lone surrogates")
    if len(turns) > 1 and not chat:
        raise UserError(f"{place} has {len(turns)} turns, which raw text has no place for", "leave out --no-chat")
    return Conversation(turns)


def _is_unicode(text: str) -> bool:
    """Halves of characters come from bytes that are not UTF-8, or from JSON's escapes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
