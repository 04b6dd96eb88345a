"""The last lines of an engine's log, from a file or from the journal of a unit."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ddtree.errors import UserError

TAIL_BYTES = 1 << 20


def tail_of_file(file: Path) -> str:
    """At most the last MiB.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - TAIL_BYTES))
            return opened.read().decode("utf-8", "replace")
    except OSError as error:
        raise UserError(f"cannot read the log {file} ({error.strerror})", "give --log a file") from None


def tail_of_unit(unit: str) -> str:
    """The journal's last lines; empty where there is no journal, or none for this user."""
    command = ["journalctl", "--unit", unit, "--no-pager", "--output=cat", "--lines=2000", "--quiet"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout[-TAIL_BYTES:] if told.returncode == 0 else ""
