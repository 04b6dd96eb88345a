"""A folder against its lock file, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from ddtree.fetch.hashing import digests
from ddtree.fetch.lock_file import LOCK_NAME, LockedFile, LockFile, read_lock
from ddtree.fetch.transfer import Transfer
from ddtree.fetch.wanted import STAGING


@dataclass(frozen=True)
class CheckResult:
    """Attributes:
    faults: per damaged or missing file, what is wrong with it.
    others: files that the lock does not name.
    """

    lock: LockFile
    faults: dict[str, str]
    others: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        """Plain values, for machines."""
        return {
            "whole": self.is_whole,
            "files": len(self.lock.files),
            "total_bytes": self.lock.total_bytes,
            "source": self.lock.source.model_dump(mode="json", exclude_none=True),
            "faults": self.faults,
            "others": list(self.others),
        }


def check_folder(
    folder: Path, *, jobs: int = 4, tell: Callable[[Transfer], None] = lambda transfer: None
) -> CheckResult:
    """Read every file of the lock and compare.

    Raises:
        UserError: there is no lock file that can be read.
    """
    lock = read_lock(folder)
    read, counting = 0, Lock()

    def count(size: int) -> None:
        nonlocal read
        with counting:
            read += size
        tell(Transfer("checking hashes", read, lock.total_bytes))

    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda file: _fault(folder, file, count), lock.files)
        faults = {file.path: fault for file, fault in zip(lock.files, found, strict=True) if fault}
    known = {file.path for file in lock.files} | {LOCK_NAME}
    others = tuple(
        sorted(
            path
            for each in folder.rglob("*")
            if each.is_file()
            and (path := each.relative_to(folder).as_posix()) not in known
            and not path.startswith((f"{STAGING}/", ".cache/"))
        )
    )
    return CheckResult(lock, faults, others)


def _fault(folder: Path, file: LockedFile, count: Callable[[int], None]) -> str | None:
    path = folder / file.path
    try:
        if path.exists() and not path.is_file():
            return "is no file"
        size = path.stat().st_size
        if size != file.size_bytes:
            return f"has {size} bytes, {file.size_bytes} in the lock"
        found = digests(path, count)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if found.sha256 != file.sha256:
        return f"has SHA-256 {found.sha256[:12]}..., {file.sha256[:12]}... in the lock"
    return None
