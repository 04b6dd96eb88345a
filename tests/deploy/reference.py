"""The reference of every key in docs/deploy.md, made from the schema: `python tests/deploy/reference.py` writes it."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ddtree.deploy.deployment import Deployment, sections

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
MARKS = "<!-- keys -->\n", "<!-- end of keys -->\n"


def reference() -> str:
    """A table a section."""
    return "\n".join(_table(name, section) for name, section in sections().items())


def _table(name: str, section: type[BaseModel]) -> str:
    needed = Deployment.model_fields[name].is_required()
    lines = [f"### [{name}]{' (needed)' if needed else ''}", "", _text(section.__doc__), ""]
    lines += ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in section.model_fields.items():
        default = "needed" if field.is_required() else _default(field)
        lines.append(f"| `{key}` | {_kind(field.annotation)} | {default} | {_text(field.description)} |")
    return "\n".join([*lines, ""])


def _default(field: Any) -> str:
    value = field.default_factory() if field.default_factory else field.default
    if value is PydanticUndefined or value is None or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{json.dumps(value)}`"


def _kind(annotation: Any) -> str:
    """A type in words of TOML."""
    if get_origin(annotation) is Literal:
        return ", ".join(f'`"{one}"`' for one in get_args(annotation))
    if get_origin(annotation) in (types.UnionType,) or str(get_origin(annotation)) == "typing.Union":
        return " or ".join(_kind(one) for one in get_args(annotation) if one is not type(None))
    if get_origin(annotation) is tuple:
        return f"list of {_kind(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return f"table of {_kind(get_args(annotation)[1])}"
    if hasattr(annotation, "__metadata__"):
        return _kind(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "`{ file = ... }` or `{ env = ... }`"
    return {str: "text", int: "number", float: "number", bool: "true, false"}[annotation]


def _text(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def in_page(page: str) -> str:
    """What stands between the marks."""
    found = re.search(f"{MARKS[0]}(.*){MARKS[1]}", page, re.DOTALL)
    return found[1] if found else ""


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[1]
    PAGE.write_text(f"{before}{MARKS[0]}{reference()}{MARKS[1]}{after}", encoding="utf-8")
