"""The user's cache folder: where it is, whether there is room, and who may write to it now."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddtree.demo.progress import Progress
from ddtree.errors import UserError

_RESERVE_BYTES = 16_000_000


def make_folder(folder: Path) -> None:
    """Create ``folder`` and see that files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise _not_writable(folder, error.strerror or str(error)) from error
    if not writable:
        raise _not_writable(folder, "no permission")


def require_space(folder: Path, needed_bytes: int) -> None:
    """Refuse to start what the disk cannot hold."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes + _RESERVE_BYTES:
        raise UserError(
            f"not enough disk space in {folder}: {(needed_bytes + _RESERVE_BYTES) / 1e6:.0f} MB needed,"
            f" {free_bytes / 1e6:.0f} MB free",
            "free some, or set DDTREE_CACHE to a folder on another disk",
        )


@contextmanager
def exclusive(folder: Path, on_progress: Progress) -> Iterator[None]:
    """Hold ``folder`` for this process alone; the operating system frees it even if the process is killed."""
    try:
        lock = (folder / ".lock").open("ab")
    except OSError as error:
        raise _not_writable(folder, error.strerror or str(error)) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress("waiting for another ddtree that prepares the model", 0.0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _not_writable(folder: Path, reason: str) -> UserError:
    return UserError(f"cannot write to the cache folder {folder} ({reason})", "set DDTREE_CACHE to a folder of yours")
