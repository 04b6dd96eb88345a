"""How far a fetch is: bytes on disk, speed and time left, read from the files themselves whatever fetches them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_LOOK_S = 0.5
_SPEED_OVER_S = 10.0


@dataclass(frozen=True)
class Transfer:
    """Attributes:
    stage: what is done, in words.
    done_bytes, total_bytes: of all files; total is 0 where it is not known yet.
    bytes_per_s: over the last seconds; None before there is anything to measure.
    """

    stage: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float | None = None

    @property
    def left_s(self) -> float | None:
        """Time left at this speed."""
        if not self.bytes_per_s or not self.total_bytes:
            return None
        return max(0, self.total_bytes - self.done_bytes) / self.bytes_per_s


Tell = Callable[[Transfer], None]


class Watcher:
    """Tells how much of ``staging`` has grown, until it is left.

    Args:
        done_bytes: called for bytes that are in place already.
    """

    def __init__(self, stage: str, staging: Path, done_bytes: Callable[[], int], total_bytes: int, tell: Tell) -> None:
        self._stage, self._staging, self._done, self._total, self._tell = stage, staging, done_bytes, total_bytes, tell
        self._seen: deque[tuple[float, int]] = deque()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watcher:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        now, bytes_now = time.monotonic(), min(self._done() + allocated_bytes(self._staging), self._total)
        self._seen.append((now, bytes_now))
        while len(self._seen) > 2 and now - self._seen[0][0] > _SPEED_OVER_S:
            self._seen.popleft()
        then, bytes_then = self._seen[0]
        speed = max(0, bytes_now - bytes_then) / (now - then) if now > then else None
        self._tell(Transfer(self._stage, bytes_now, self._total, speed))


def allocated_bytes(folder: Path) -> int:
    """Bytes that files take on disk; a file that is written in several places at once has holes that do not count."""
    total = 0
    for path in folder.rglob("*"):
        try:
            stat = path.lstat()
        except OSError:
            continue  # moved into place just now
        if path.is_file() and not path.is_symlink():
            total += min(stat.st_size, stat.st_blocks * 512)
    return total
