"""What is on disk, and not only on its way there."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on disk, those that were just given or taken included."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace ``path``: readers see the old content or the new, never a part. A link there is replaced, not followed.

    Args:
        content: text is written as UTF-8, with the line ends that it has.

    Raises:
        OSError: it cannot be written; what was there stays, and nothing half-written.
    """
    data = content.encode() if isinstance(content, str) else content
    draft = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    draft.unlink(missing_ok=True)  # of a process that was killed and had the same number
    try:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)
