"""Numbers on the command line are written plainly: Python itself would take `1_0`, ` 1` and other scripts' digits."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer

_WRITTEN = {int: re.compile(r"[+-]?[0-9]+"), float: re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")}
_NAMES = {int: "whole number", float: "number"}
_LONGEST = 30


def plain_number(hint: Any) -> Any:
    """The annotation of an option; where it is a number's, with a reader of its own that also keeps its range."""
    if get_origin(hint) is not Annotated:
        return hint
    kind, option, *others = get_args(hint)
    inner = {part for part in get_args(kind) or (kind,) if part is not NoneType}
    number = next(iter(inner)) if len(inner) == 1 else None
    if number not in _WRITTEN or getattr(option, "parser", True) is not None:
        return hint
    option = copy.copy(option)
    option.parser = _reader(number, option.min, option.max)
    option.metavar = option.metavar or ("INTEGER" if number is int else "FLOAT")
    option.min = option.max = None
    return Annotated[kind, option, *others]


def _reader(kind: Any, low: float | None, high: float | None) -> Callable[[Any], Any]:
    bounds = [f"at least {low}"] * (low is not None) + [f"at most {high}"] * (high is not None)
    wanted = f"choose a {_NAMES[kind]} {' and '.join(bounds)}".strip()

    def read(given: Any) -> Any:
        text = str(given)  # defaults come as numbers
        if len(text) > _LONGEST or not _WRITTEN[kind].fullmatch(text):
            raise typer.BadParameter(f"{text[:_LONGEST]!r} is no plain number: {wanted}")
        value = kind(text)
        if (low is not None and value < low) or (high is not None and value > high):
            raise typer.BadParameter(f"{text} is out of range: {wanted}")
        return value

    return read
