"""What is on disk, and not only on its way there."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

UNFINISHED = ".unfinished"
"""Ending of files that are not whole; a killed process leaves them behind, hidden."""


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on disk, those that were just given or taken included."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace ``path``, whose mode stays: readers see the old content or the new, never a part.

    A link is replaced, not followed.

    What is no file, such as a terminal or a pipe, is written to.

    Args:
        content: text is written as UTF-8, with the line ends that it has.

    Raises:
        OSError: it cannot be written; what was there stays, and nothing half-written.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    draft = path.with_name(f".{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with draft.open("xb") as file:
            if path.is_file() and not path.is_symlink():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)
