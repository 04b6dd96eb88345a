"""CPU time of another process' threads, as the kernel counts it (Linux)."""

import contextlib
import os
from pathlib import Path


def thread_cpu_s(pid: int) -> dict[int, float]:
    """CPU seconds so far of every thread of a process, by its number; that of the first thread is the process' own."""
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
            told = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text()
            found[int(thread)] = 1e-9 * int(told.split()[0])
    return found
