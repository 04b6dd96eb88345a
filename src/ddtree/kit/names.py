"""Names of files within a kit: plain enough that no system, archive or reader takes two of them for one."""

from __future__ import annotations

import re
import unicodedata
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator

from ddtree.errors import UserError

LONGEST_PATH = 240
DEEPEST = 24
_PLAIN = re.compile(r"[A-Za-z0-9_.+@=,~ -]+")
_DEVICES = {"con", "prn", "aux", "nul", *(f"{word}{n}" for word in ("com", "lpt") for n in range(1, 10))}


def fault_of(path: str) -> str | None:
    """Why a relative path cannot be one of a kit's; None where it can."""
    if not path or path.startswith("/") or re.match(r"[A-Za-z]:", path):
        return "is no relative path"
    if "\\" in path:
        return "has a backslash"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "leads out of the kit, or is not in its shortest form"
    if not path.isascii():
        return f"has characters beyond ASCII (read as {unicodedata.normalize('NFKC', path)!a})"
    if any(not _PLAIN.fullmatch(part) or part != part.strip() or part.endswith(".") for part in parts):
        return "has characters that are not plain"
    if any(part.split(".")[0].lower() in _DEVICES for part in parts):
        return "is a device's name on some systems"
    if len(path) > LONGEST_PATH or len(parts) > DEEPEST:
        return "is too long or too deep"
    return None


def checked(path: str) -> str:
    """The path itself.

    Raises:
        UserError: it cannot be one of a kit's.
    """
    if why := fault_of(path):
        raise UserError(f"the name {path[:100]!a} {why}", "a kit has plain names only")
    return path


def _plain_path(path: str) -> str:
    if why := fault_of(path):
        raise ValueError(f"{path[:80]!a} {why}")
    return path


PlainPath = Annotated[str, AfterValidator(_plain_path)]
"""A relative path in a record of a kit: one that leads elsewhere makes the record invalid."""


def slug(text: str) -> str:
    """A plain name for a part of a path."""
    plain = re.sub(r"[^A-Za-z0-9_.+=-]+", "-", text).strip("-. ")
    return plain[:80].rstrip("-. ") or "unnamed"


def folded(path: str) -> str:
    """Two paths with the same value are one file on some system."""
    return unicodedata.normalize("NFKC", str(PurePosixPath(path))).casefold()
