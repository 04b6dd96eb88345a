"""Hashes of large files, told as they go on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PIECE_BYTES = 4 << 20

Tell = Callable[[int], None]
"""Called with bytes that were read just now."""


@dataclass(frozen=True)
class Digests:
    """Attributes:
    git_sha1: as git names a blob of this content.
    """

    size_bytes: int
    sha256: str
    git_sha1: str


def digests(path: Path, tell: Tell = lambda size: None) -> Digests:
    """Read a file once. Raises OSError."""
    size = path.stat().st_size
    wide, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    is_small = size <= 64 << 20  # git blobs of a hub repository are small; the large files are pinned by SHA-256
    read = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            wide.update(piece)
            if is_small:
                git.update(piece)
            read += len(piece)
            tell(len(piece))
    return Digests(read, wide.hexdigest(), git.hexdigest() if is_small else "")
