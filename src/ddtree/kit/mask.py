"""Secrets are found and taken out before anything is written to a kit.

Three nets: values that are known to be secrets (the deployment's own, and those of variables with telling names), in
every spelling that a file may give them; shapes of keys and tokens, by `detect-secrets` and by own rules for what
it lacks; and words after a telling name (``password=``, ``--api-key``). Entropy is no criterion: a kit is full of
hashes.
"""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any
from urllib.parse import quote, quote_plus

from ddtree.errors import UserError
from ddtree.kit.record import Masked
from ddtree.kit.secret_shapes import PLACES, SHAPES, is_plain, is_telling, looks_secret

MASK = "***masked***"
_SHORTEST_KNOWN = 4

_OF_A_TOKEN = re.compile(r"[A-Za-z0-9._~+/=:*-]+")
# The value is looked at and not passed over: `A=B=c` is read as A's and as B's.
_NAMED = re.compile(
    r"(?<![A-Za-z0-9_])(?P<name>-{0,2}[A-Za-z_][A-Za-z0-9_.\-]{1,60})"
    r"(?P<join>(?:\\?[\"'])?[ \t]*(?:=>|:=|[:=])[ \t]*|\\?[\"'],[ \t]*(?=\\?[\"'])|[ \t]+)"
    r"(?=(?P<value>\\\"(?:[^\"\\]|\\[^\"])*\\\"|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s,;\"'&]+))"
)
_CODE = (".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".js", ".ts", ".rs", ".go", ".diff")
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
        for spelling, kind in sorted(self._known.items(), key=lambda item: -len(item[0])):
            if times := text.count(spelling):
                counts[kind] += times
                text = text.replace(spelling, MASK)
        for kind, cut in _cutters():
            text, times = cut(text)
            counts[kind] += times
        lines = text.splitlines(keepends=True)
        text = "".join(self._named(line, counts, is_code) for line in lines)
        for kind in [kind for kind, times in counts.items() if not times]:
            del counts[kind]
        return text

    def _named(self, text: str, counts: Counter[str], is_code: bool) -> str:
        pieces: list[str] = []
        end = 0
        for match in _NAMED.finditer(text):
            name, join, value = match["name"], match["join"], match["value"]
            bare = value.strip("\\\"'")
            start = match.start("value") + value.find(bare)
            quote = text[match.start() - 1 : match.start()]
            if quote in ("'", '"') and value[0] not in "\\\"'" and (closed := text.find(quote, start)) > 0:
                bare = text[start:closed]  # all of `"NAME=two words"`
            is_flag = name.startswith("--")
            if start < end or not is_telling(name) or is_plain(bare, name) or MASK in value:
                continue
            if not is_flag and not re.search("[:=]", join):
                continue  # words of a sentence, or of a list
            if (is_flag and bare.startswith("--")) or (is_code and value[0] not in "\\\"'"):
                continue
            if re.search("(?i)token$", name) and not name.isupper() and not _OF_A_TOKEN.fullmatch(bare):
                continue  # a token of text
            if bare.lower() == name.rpartition(".")[2].lower():
                continue  # `api_key=api_key`
            if looks_secret(bare):
                counts[f"value of {name.lstrip('-')}"] += 1
                pieces += [text[end:start], MASK]
                end = start + len(bare)
        return "".join([*pieces, text[end:]])


def _cut(match: re.Match[str]) -> str:
    if not match.re.groups or match.lastindex is None:
        return MASK
    if MASK in match[0]:
        return match[0]
    start, end = match.span(match.lastindex)
    return match[0][: start - match.start()] + MASK + match[0][end - match.start() :]


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
def _cutters() -> list[tuple[str, Callable[[str], tuple[str, int]]]]:
    """What each kind is called, and what takes it out of a text and counts it."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    found: list[tuple[str, Callable[[str], tuple[str, int]]]] = [
        (kind, partial(re.compile(pattern).subn, _cut)) for kind, pattern in (SHAPES | PLACES).items()
    ]
    # Of the library those that know a shape; not those of entropy, of addresses and of bare words. Their groups are for
    # their own use: all that matches goes.
    left_out = {"PrivateKeyDetector", "IPPublicDetector", "KeywordDetector", "BasicAuthDetector"}
    detectors: dict[str, Any] = get_mapping_from_secret_type_to_class()
    for kind, detector in detectors.items():
        if detector.__name__ not in left_out:
            for pattern in getattr(detector, "denylist", None) or ():
                found.append((kind, partial(re.compile(pattern).subn, MASK)))
    return found
