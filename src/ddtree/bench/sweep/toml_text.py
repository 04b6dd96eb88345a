"""A deployment as TOML text: tables of plain values, as deployment files have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def toml_text(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """Values first, then the tables below, each under its full name."""
    lines = [f"{_key(name)} = {_value(value)}" for name, value in data.items() if not isinstance(value, dict)]
    tables = [(name, value) for name, value in data.items() if isinstance(value, dict)]
    head = f"[{'.'.join(map(_key, path))}]\n" if path and (lines or not tables) else ""
    parts = [head + "\n".join(lines) + "\n"] if head or lines else []
    parts += [toml_text(value, (*path, name)) for name, value in tables]
    return "\n".join(parts)


def _key(name: str) -> str:
    is_bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if is_bare else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)
