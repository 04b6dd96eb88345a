"""What a server told, made fit to be worked with and stored: the one place where its JSON and its words come in."""

from __future__ import annotations

import json
import math
import re
from typing import Any

MOST_COUNT = 2**31
"""No count of tokens or rounds reaches it; what does is no count."""
_MOST_DEPTH = 100
_MOST_CHARS = 500
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can write half a character, which no file of UTF-8 can hold


def read_json(raw: bytes) -> Any:
    """The value of ``raw``.

    Numbers that are not finite or need more than 64 bits are None, and half characters are U+FFFD.

    Raises:
        ValueError: it is not JSON, or nested more than 100 deep.
    """
    text = raw.decode("utf-8", "surrogatepass").strip()
    try:
        value, end = _decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if end != len(text):
        raise ValueError("something follows the value")
    # Few values need more: those with a surrogate, written out or as bytes, and those that may be deep.
    has_escape = b"\\" in raw and (b"\\ud" in raw or b"\\uD" in raw)
    is_fit = not has_escape and b"\xed" not in raw and raw.count(b"{") + raw.count(b"[") <= _MOST_DEPTH
    return value if is_fit else _made_fit(value, 0)


def at(value: Any, *names: str) -> Any:
    """What ``value`` holds under ``names``, one within the other; None where it holds no such thing."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def count(value: Any) -> int:
    """``value``, where it is a count of tokens or rounds.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST_COUNT:
        raise ValueError(f"{value!r} is no count")
    return value


def number(value: Any) -> float:
    """``value``, where it is a finite number.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def words(text: str, key: str | None) -> str:
    """``text`` on one line, without ``key`` and half characters, of 500 characters at most."""
    if key:
        text = text.replace(key, "(the key)")
    return " ".join(_LONE_SURROGATE.sub("\ufffd", text).split())[:_MOST_CHARS]


def _made_fit(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if not isinstance(value, (dict, list)):
        return value
    if depth == _MOST_DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(value, list):
        return [_made_fit(item, depth + 1) for item in value]
    return {_made_fit(name, depth + 1): _made_fit(item, depth + 1) for name, item in value.items()}


def _whole(digits: str) -> int | None:
    if len(digits) < 19:
        return int(digits)
    value = int(digits) if len(digits) <= 20 else 2**63
    return value if -(2**63) <= value < 2**63 else None


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


def _not_a_number(name: str) -> None:
    return None


_decode = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=_not_a_number).raw_decode
