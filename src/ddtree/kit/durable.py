"""Folders that appear at once: made beside their place, written to disk, and only then given their name."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ddtree.disk import UNFINISHED, sync_folder
from ddtree.errors import UserError

_AT_FDCWD = -100


@contextlib.contextmanager
def appearing(place: Path) -> Iterator[Path]:
    """An empty folder that becomes ``place`` at the end of the block, or vanishes where that fails.

    What a killed process left behind is removed by the next one. The lock keeps two apart.

    Raises:
        UserError: ``place`` is there already, cannot be made, or is being made.
    """
    place = place.absolute()  # the BagIt library changes the working folder while it works
    _require_free(place)
    with drafting(place) as draft:
        yield draft
        sync_tree(draft)
        _require_free(place)
        draft.rename(place)
        sync_folder(place.parent)


@contextlib.contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """An empty folder that takes the place of ``place`` at the end of the block; readers see the old one or the new."""
    place = place.absolute()
    with drafting(place) as draft:
        yield draft
        sync_tree(draft)
        _exchange(draft, place)
        sync_folder(place.parent)


@contextlib.contextmanager
def drafting(place: Path) -> Iterator[Path]:
    """An empty folder beside ``place``, out of sight, that vanishes at the end of the block, or when it is next made.

    It is its own lock, which goes with the process that holds it.
    """
    draft = place.with_name(f".{place.name}{UNFINISHED}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if draft.exists():
            with _locked(draft, place):
                shutil.rmtree(draft)
        draft.mkdir()
        with _locked(draft, place):
            try:
                yield draft
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        what = error.filename if isinstance(error.filename, str) else place
        raise UserError(f"cannot write {what} ({error.strerror or error})", "check the disk and the rights") from error


@contextlib.contextmanager
def _locked(draft: Path, place: Path) -> Iterator[None]:
    handle = os.open(draft, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(f"another process makes {place}", "wait for it, or give another place") from None
    finally:
        os.close(handle)


def _require_free(place: Path) -> None:
    if place.exists() or place.is_symlink():
        raise UserError(f"{place} is there already", "give another place, or move it away")


def sync_tree(folder: Path) -> None:
    """Wait until every file and folder below is on disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            sync_folder(path)
    sync_folder(folder)


def _exchange(new: Path, old: Path) -> None:
    """Swap two names in one step where the system can; else in two, of which a kill between leaves both folders."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(libc, "renameat2"):
            exchange = 2
            done = libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), exchange)
            if done == 0:
                return
    aside = old.with_name(f".{old.name}.before")
    shutil.rmtree(aside, ignore_errors=True)
    old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)
