"""One file that shall be in the folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from ddtree.errors import UserError

STAGING = ".ddtree-fetch"
"""Folder inside the target folder where files grow; what is outside of it is verified."""


@dataclass(frozen=True)
class WantedFile:
    """A file by its source's own account.

    Attributes:
        path: relative to the folder, parts joined by ``/``.
        size_bytes: None where the source does not tell before the file is asked for.
        sha256: None where the source pins the content otherwise.
        git_sha1: hash of the git blob, for small files of a hub repository.
        url: where it comes from.
    """

    path: str
    size_bytes: int | None
    sha256: str | None
    git_sha1: str | None
    url: str


def checked_path(path: str, source: str) -> str:
    """Refuse a name that would lead out of the folder, or into the staging folder.

    Raises:
        UserError: it does.
    """
    pure = PurePosixPath(path)
    parts = path.split("/")
    is_bad = (
        not path
        or pure.is_absolute()
        or "\\" in path
        or any(part in ("", ".", "..") for part in parts)
        or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in path)
        or any(
            len(part.encode("utf-8", "replace")) > 200 for part in parts
        )  # with an ending of ours it must fit a file system
        or parts[0] == STAGING
        or parts[0].startswith("ddtree-fetch.lock.json")
    )
    if is_bad:
        raise UserError(
            f"{source} names a file {path[:100]!r}, which cannot be in a folder of weights", "trust no such list"
        )
    return path
