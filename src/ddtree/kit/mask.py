"""Secrets are found and taken out before anything is written to a kit.

Three nets: values that are known to be secrets (the deployment's own, and those of variables with telling names), in
every spelling that a file may give them; shapes of keys and tokens, by `detect-secrets` and by own rules for what
it lacks; and words after a telling name (``password=``, ``--api-key``). Entropy is no criterion: a kit is full of
hashes. What is JSON stays JSON, since a kit reads its records again.
"""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any
from urllib.parse import quote, quote_plus

from ddtree.errors import UserError
from ddtree.kit.json_text import Span, cut_json, pieces_of, strings_with_escapes, values_by_name
from ddtree.kit.record import Masked
from ddtree.kit.secret_shapes import PLACES, SHAPES, is_plain, is_telling, looks_secret

MASK = "***masked***"
_SHORTEST_KNOWN = 4

_OF_A_TOKEN = re.compile(r"[A-Za-z0-9._~+/=:*-]+")
# The value is looked at and not passed over: `A=B=c` is read as A's and as B's.
_NAMED = re.compile(
    r"(?<![A-Za-z0-9_])(?P<name>-{0,2}[A-Za-z_][A-Za-z0-9_.\-]{1,60})"
    r"(?P<join>(?:\\?[\"'])?[ \t]*(?:=>|:=|[:=])[ \t]*(?:[bBuU](?=[\"']))?|\\?[\"'],[ \t]*(?=\\?[\"'])|[ \t]+)"
    r"(?=(?P<value>\\\"(?:[^\"\\]|\\[^\"])*\\\"|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s,;\"'&]+))"
)
_QUOTES = ("\\", '"', "'")
_CODE = (".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".js", ".ts", ".rs", ".go")
"""In such files a value without quotes is a name."""


class Masker:
    """Takes secrets out of what goes into one kit, and keeps account of it.

    Args:
        known: values that are secrets, by what they are.
        is_strict: refuse instead.
    """

    def __init__(self, known: Mapping[str, str] = {}, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._known: dict[str, str] = {}
        self._found: Counter[tuple[str, str]] = Counter()
        for kind, value in known.items():
            self.learn(kind, value)

    def learn(self, kind: str, value: str) -> None:
        """From here on this value is a secret wherever it stands."""
        if len(value) >= _SHORTEST_KNOWN and not is_plain(value):
            for spelling in _spellings(value):
                self._known.setdefault(spelling, kind)

    def learn_environment(self, environment: Mapping[str, str]) -> None:
        """The values of variables with telling names are secrets."""
        for name, value in environment.items():
            if is_telling(name):
                self.learn(f"value of {name}", value)

    @property
    def masked(self) -> list[Masked]:
        """What was taken out, by file."""
        return [Masked(file=file, kind=kind, times=n) for (file, kind), n in sorted(self._found.items())]

    def text(self, text: str, file: str) -> str:
        """``text`` without secrets.

        Raises:
            UserError: there is one, and the masker is strict.
        """
        counts: Counter[str] = Counter()
        told = self._without(text, counts, file.endswith(_CODE))
        self._account(counts, file)
        return told

    def content(self, content: bytes, file: str) -> bytes:
        """A file's content without secrets; bytes that are no UTF-8 stay as they are."""
        told = self.text(content.decode("utf-8", "surrogateescape"), file)
        return told.encode("utf-8", "surrogateescape")

    def environment(self, environment: Mapping[str, str], file: str) -> dict[str, str]:
        """Variables; the value of one with a telling name is taken out as a whole."""
        told: dict[str, str] = {}
        for name, value in sorted(environment.items()):
            if is_telling(name) and not is_plain(value, name):
                self._account(Counter([f"value of {name}"]), file)
                told[name] = MASK
            else:
                told[name] = self.text(value, file)
        return told

    def arguments(self, arguments: Iterable[str], file: str) -> list[str]:
        """A command line; what follows a telling flag is taken out."""
        told: list[str] = []
        before = ""
        for word in arguments:
            if before.startswith("-") and "=" not in before and is_telling(before) and not word.startswith("--"):
                self._account(Counter([f"value of {before}"]), file)
                told.append(MASK)
            else:
                told.append(self.text(word, file))
            before = word
        return told

    def _account(self, counts: Counter[str], file: str) -> None:
        if counts and self._is_strict:
            kinds = ", ".join(sorted(counts))
            raise UserError(f"{file} holds secrets ({kinds})", "take them out at their source, or leave --strict out")
        for kind, times in counts.items():
            self._found[file, kind] += times

    def _without(self, text: str, counts: Counter[str], is_code: bool) -> str:
        return "".join(self._of_piece(piece, counts, is_json, is_code) for piece, is_json in pieces_of(text))

    def _of_piece(self, text: str, counts: Counter[str], is_json: bool, is_code: bool) -> str:
        cut = cut_json if is_json else _cut
        for spelling, kind in sorted(self._known.items(), key=lambda item: -len(item[0])):
            if spelling in text:
                text, are_cut = cut(text, [match.span() for match in re.finditer(re.escape(spelling), text)], MASK)
                counts[kind] += sum(are_cut)
        for kind, find in _finders():
            if spans := list(find(text)):
                text, are_cut = cut(text, spans, MASK)
                counts[kind] += sum(are_cut)
        found = list(_named(text, is_code))
        text, are_cut = cut(text, [span for span, _ in found], MASK)
        counts.update(kind for (_, kind), is_cut in zip(found, are_cut, strict=True) if is_cut)
        if is_json:
            text = self._of_strings(_by_name(text, counts), counts, is_code)
        for kind in [kind for kind, times in counts.items() if not times]:
            del counts[kind]
        return text

    def _of_strings(self, text: str, counts: Counter[str], is_code: bool) -> str:
        """JSON whose strings are looked at as they read: behind escapes, and as JSON of their own."""
        spans, words = [], []
        for span, told in strings_with_escapes(text):
            if (without := self._without(told, counts, is_code)) != told:
                spans.append(span)
                words.append(json.dumps(without))
        return _replaced(text, spans, words)


def _by_name(text: str, counts: Counter[str]) -> str:
    """JSON without the values that go by a telling name, wherever name and value stand."""
    found: dict[Span, str] = {}
    for span, told, name in values_by_name(text):
        if is_telling(name) and MASK not in told and _is_secret(told, name):
            found[span] = f"value of {name.lstrip('-')}"
    counts.update(found.values())
    return _replaced(text, sorted(found), [json.dumps(MASK)] * len(found))


def _is_secret(value: str, name: str) -> bool:
    """Whether what goes by this telling name is one."""
    if re.search("(?i)token$", name) and not name.isupper() and not _OF_A_TOKEN.fullmatch(value):
        return False  # a token of text
    if value.lower() == name.rpartition(".")[2].lower():
        return False  # `api_key=api_key`
    return not is_plain(value, name) and looks_secret(value)


def _named(text: str, is_code: bool) -> Iterator[tuple[Span, str]]:
    """Values after telling names, and what kind each is."""
    offset = 0
    flat = re.sub(r"\\\r?\n", lambda ending: " " * len(ending[0]), text)  # a line that goes on
    for line in flat.splitlines(keepends=True):
        end = 0
        for match in _NAMED.finditer(line):
            name, join, value = match["name"], match["join"], match["value"]
            bare = value.strip("\\\"'")
            start = match.start("value") + value.find(bare)
            quote = line[match.start() - 1 : match.start()]
            if value[0] not in _QUOTES:
                if join[0] in _QUOTES:
                    # `"name":null}`, where the quote before the name is the name's own
                    bare = re.split(r"[\]})]", bare)[0]
                elif quote in ("'", '"') and (closed := _closing(line, match.start() - 1).search(line, start)):
                    bare = line[start : closed.start()]  # all of `"NAME=two words"`
            is_flag = name.startswith("--")
            if start < end or not is_telling(name) or len(bare.replace(MASK, "")) < _SHORTEST_KNOWN:
                continue
            if not is_flag and not re.search("[:=]", join):
                continue  # words of a sentence, or of a list
            if (is_flag and bare.startswith("--")) or (is_code and value[0] not in _QUOTES):
                continue
            if _is_secret(bare, name):
                end = start + len(bare)
                yield (offset + start, offset + end), f"value of {name.lstrip('-')}"
        offset += len(line)


def _closing(line: str, opening: int) -> re.Pattern[str]:
    """What closes the quote at ``opening``: one that is escaped as it is."""
    return re.compile((r"\\" if line[opening - 1 : opening] == "\\" else r"(?<!\\)") + line[opening])


def _cut(text: str, spans: Sequence[Span], word: str) -> tuple[str, list[bool]]:
    """``text`` with ``word`` in place of ``spans``, which ascend; each is taken."""
    return _replaced(text, spans, [word] * len(spans)), [True] * len(spans)


def _replaced(text: str, spans: Sequence[Span], words: Sequence[str]) -> str:
    pieces: list[str] = []
    end = 0
    for (start, stop), word in zip(spans, words, strict=True):
        pieces += [text[end:start], word]
        end = stop
    return "".join([*pieces, text[end:]])


def _spans(pattern: re.Pattern[str], text: str) -> Iterator[Span]:
    """The last group of each match, where the pattern has groups; what is masked already is left out."""
    for match in pattern.finditer(text):
        if MASK not in match[0]:
            yield match.span(match.lastindex or 0)


def _whole_spans(pattern: re.Pattern[str], text: str) -> Iterator[Span]:
    return (match.span() for match in pattern.finditer(text))


def _spellings(value: str) -> set[str]:
    """How files write a value: as it is, quoted for shells, units, JSON, URLs and HTML, and in base64."""
    raw = value.encode()
    found = {
        value,
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        quote(value),
        quote_plus(value),
    }
    found |= {
        quote(value, safe=""),
        html.escape(value),
        shlex.quote(value),
        value.replace("%", "%%"),
        repr(value)[1:-1],
    }
    found.add(re.sub(r'(["\\`$])', r"\\\1", value))
    if len(value) >= 8:
        for shift in range(3):  # wherever it stands in a longer text that is encoded as a whole
            coded = base64.b64encode(b"\0" * shift + raw).decode().rstrip("=")
            found.add(coded[{0: 0, 1: 2, 2: 3}[shift] : len(coded) - 1])
        found |= {raw.hex(), raw.hex().upper(), base64.urlsafe_b64encode(raw).decode().rstrip("=")}
    return {each for each in found if len(each) >= _SHORTEST_KNOWN}


@cache
def _finders() -> list[tuple[str, Callable[[str], Iterator[Span]]]]:
    """What each kind is called, and what finds it in a text."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    found: list[tuple[str, Callable[[str], Iterator[Span]]]] = [
        (kind, partial(_spans, re.compile(pattern))) for kind, pattern in (SHAPES | PLACES).items()
    ]
    # Of the library those that know a shape; not those of entropy, of addresses and of bare words. Their groups are for
    # their own use: all that matches goes.
    left_out = {"PrivateKeyDetector", "IPPublicDetector", "KeywordDetector", "BasicAuthDetector"}
    detectors: dict[str, Any] = get_mapping_from_secret_type_to_class()
    for kind, detector in detectors.items():
        if detector.__name__ not in left_out:
            for pattern in getattr(detector, "denylist", None) or ():
                found.append((kind, partial(_whole_spans, re.compile(pattern))))
    return found
