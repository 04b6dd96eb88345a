"""Files that survive a crash at any instant: lines appended with fsync, and folders that one process writes to."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ddtree.disk import sync_folder
from ddtree.errors import UserError


def append_line(path: Path, line: str) -> None:
    """Append one line and wait until it is on disk."""
    is_new = not path.exists()
    with path.open("ab") as file:
        _append(file, line)
    if is_new:
        sync_folder(path.parent)


def drop_torn_line(path: Path) -> None:
    """Cut off what a crash left of a line at the end of ``path``."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())


def whole_lines(path: Path) -> list[str]:
    """The complete lines of ``path``; none where there is no such file."""
    if not path.exists():
        return []
    try:
        content = path.read_bytes()
        text = content[: content.rfind(b"\n") + 1].decode("utf-8")  # a letter may be torn too
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})", "give a result folder") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged: it is not UTF-8", "restore it, or measure again") from error
    return [line for line in text.split("\n") if line]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make ``folder``, and keep other processes from writing to it meanwhile; the lock goes with the process.

    A folder that was made here and is still empty at the end goes away again.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("wb")
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror})", "give --out another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process writes to {folder}", "wait for it, or give another folder") from None
        try:
            yield
        finally:
            if is_new and os.listdir(folder) == [".lock"]:
                with suppress(OSError):
                    (folder / ".lock").unlink()
                    folder.rmdir()


def folders_with(folder: Path, name: str) -> list[Path]:
    """The folders under ``folder`` that hold a file ``name``, in order; what cannot be looked into is passed over."""
    return sorted(Path(place) for place, _, files in os.walk(folder) if name in files)


def _append(file: BinaryIO, line: str) -> None:
    file.write(line.encode("utf-8") + b"\n")
    file.flush()
    os.fsync(file.fileno())
