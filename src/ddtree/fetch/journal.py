"""Which files of an unfinished fetch are in place and verified, so that the next run need not read them again."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from ddtree.disk import write_whole
from ddtree.fetch.hashing import Digests

_NAME = "verified.json"


class Journal:
    """Kept in the staging folder; a file that was touched since does not count. Safe to use from several threads."""

    def __init__(self, folder: Path, staging: Path) -> None:
        self._folder, self._file, self._lock = folder, staging / _NAME, threading.Lock()
        try:
            told = json.loads(self._file.read_text(encoding="utf-8"))
            self._entries = {str(path): dict(entry) for path, entry in told.items()}
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):
            self._entries = {}

    def find(self, path: str) -> Digests | None:
        """What was verified of a file, where it is as it was then."""
        entry = self._entries.get(path)
        try:
            stat = (self._folder / path).stat()
            if entry and (stat.st_size, stat.st_mtime_ns) == (entry["size_bytes"], entry["mtime_ns"]):
                return Digests(entry["size_bytes"], entry["sha256"], entry["git_sha1"])
        except (OSError, KeyError):
            pass
        return None

    def add(self, path: str, digests: Digests) -> None:
        """Note a file that is in place."""
        stat = (self._folder / path).stat()
        with self._lock:
            self._entries[path] = vars(digests) | {"mtime_ns": stat.st_mtime_ns}
            write_whole(self._file, json.dumps(self._entries))
