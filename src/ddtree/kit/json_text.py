"""Text cut out of JSON in such a way that it stays JSON, with every key and every bracket where it was."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Span = tuple[int, int]

_TOKEN = re.compile(r'(?P<string>"(?:[^"\\]|\\.)*")|(?P<number>-?\d[\d.eE+-]*)|true|false|null|[\[\]{},:]')
_COLON = re.compile(r"\s*:")
# A letter of a string as it is written. A pair of surrogates is one: half of it is no text.
_LETTER = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|[^\\]", re.DOTALL
)


@dataclass(frozen=True)
class _Token:
    kind: str
    start: int
    end: int
    is_key: bool


@dataclass
class _Level:
    """An open object or list: the name it goes by, and what came in it so far."""

    name: str
    key: str | None = None
    before: str = ""
    labels: list[str] = field(default_factory=list)
    value: tuple[Span, str] | None = None


def pieces_of(text: str) -> Iterator[tuple[str, bool]]:
    """``text`` in pieces, and of each whether it is JSON: all of it, or single lines that are objects (JSON Lines)."""
    if is_json(text):
        yield text, True
        return
    rest: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("{") and is_json(line):
            if rest:
                yield "".join(rest), False
                rest = []
            yield line, True
        else:
            rest.append(line)
    if rest:
        yield "".join(rest), False


def is_json(text: str) -> bool:
    """Whether it is an object or a list of JSON."""
    if text.lstrip()[:1] not in ("{", "["):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def cut_json(text: str, spans: Sequence[Span], word: str) -> tuple[str, list[bool]]:
    """JSON ``text`` with ``word`` in place of ``spans``, which ascend; and for each whether anything of it was taken.

    A span counts within the token in which it begins: of a string the letters that it meets, a number as a whole, which
    becomes a string. Where it goes on into the next items of a list, so does the cut. Literals and what holds the
    document together stay.
    """
    tokens = list(_tokens(text))
    pieces: list[str] = []
    are_cut: list[bool] = []
    end = first = 0
    for start, stop in spans:
        while first < len(tokens) and tokens[first].end <= start:
            first += 1
        met = [_met(text, token, max(start, end), stop) for token in _reached(tokens, first, stop)]
        cuts = [(token, place) for token, place in zip(_reached(tokens, first, stop), met, strict=True) if place]
        for token, place in cuts:
            pieces += [text[end : place[0]], word if token.kind == "string" else json.dumps(word)]
            end = place[1]
        are_cut.append(bool(cuts))
    return "".join([*pieces, text[end:]]), are_cut


def values_by_name(text: str) -> Iterator[tuple[Span, str, str]]:
    """Where each string and number of JSON ``text`` stands, what it says, and the name that it goes by.

    The name is its key, or the key of its list or of the object that it is the ``value`` of; a ``name`` or ``key``
    beside ``value``; the flag before it in a list. A value with several comes several times.
    """
    levels: list[_Level] = []
    for token in _tokens(text):
        level = levels[-1] if levels else _Level("")
        if token.kind in ("{", "["):
            levels.append(_Level(level.name if level.key is None else level.key))
        elif token.kind in ("}", "]"):
            levels.pop()
            yield from ((*level.value, name) for name in level.labels if level.value)
        elif token.is_key:
            level.key = json.loads(text[token.start : token.end])
        elif token.kind in ("string", "number"):
            raw = text[token.start : token.end]
            place, told = (token.start, token.end), json.loads(raw) if token.kind == "string" else raw
            if level.key is None:
                yield place, told, level.name
                if level.before.startswith("-") and "=" not in level.before and not told.startswith("--"):
                    yield place, told, level.before
            else:
                yield place, told, level.key
                if level.key.lower() in ("name", "key", "variable"):
                    level.labels.append(told)
                elif level.key.lower() == "value":
                    level.value = place, told
                    level.labels.append(level.name)
            level.before = told


def strings_with_escapes(text: str) -> Iterator[tuple[Span, str]]:
    """Where each string of JSON ``text`` stands that is not written as it reads, and how it reads."""
    for token in _tokens(text):
        if token.kind == "string" and "\\" in (raw := text[token.start : token.end]):
            yield (token.start, token.end), json.loads(raw)


def _tokens(text: str) -> Iterator[_Token]:
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or match[0]
        yield _Token(kind, match.start(), match.end(), kind == "string" and bool(_COLON.match(text, match.end())))


def _reached(tokens: Sequence[_Token], first: int, stop: int) -> Iterator[_Token]:
    """The string or number at ``first``, and what follows it in the same list."""
    for place in range(first, len(tokens)):
        token = tokens[place]
        if token.start >= stop or token.kind not in ("string", "number", ",") or (token.is_key and place > first):
            return
        if token.kind != ",":
            yield token
        if token.is_key:
            return


def _met(text: str, token: _Token, start: int, stop: int) -> Span | None:
    """What of the token lies between ``start`` and ``stop``: whole letters, or the whole number."""
    if token.kind == "number":
        return token.start, token.end
    inside = _LETTER.finditer(text, token.start + 1, token.end - 1)
    met = [match.span() for match in inside if match.end() > start and match.start() < stop]
    return (met[0][0], met[-1][1]) if met else None
