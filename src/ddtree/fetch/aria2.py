"""aria2c, where it is installed: many connections for each file, which is what fills a fast line."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ddtree.errors import UserError
from ddtree.fetch.wanted import WantedFile

_OPTIONS = (
    "--no-conf=true",
    "--continue=true",
    "--file-allocation=none",
    "--auto-file-renaming=false",
    "--allow-overwrite=true",
    "--remote-time=false",
    "--follow-torrent=false",
    "--follow-metalink=false",
    "--check-integrity=true",
    "--max-connection-per-server=16",
    "--split=16",
    "--min-split-size=4M",
    "--max-tries=5",
    "--retry-wait=2",
    "--timeout=30",
    "--connect-timeout=15",
    "--enable-color=false",
    "--show-console-readout=false",
    "--summary-interval=0",
    "--console-log-level=error",
    "--download-result=hide",
)
_CHECKSUM_FAILED = 32


def find_aria2() -> str | None:
    """The program, if it is installed."""
    return shutil.which("aria2c")


def run_aria2(program: str, files: Sequence[WantedFile], staging: Path, jobs: int) -> None:
    """Bring files into ``staging``, going on from what is there. Their content is the caller's to verify.

    Raises:
        UserError: aria2c gave up; what came stays for the next run.
    """
    listed = "".join(_entry(each) for each in files)
    command = [program, *_OPTIONS, f"--max-concurrent-downloads={jobs}", f"--dir={staging}", "--input-file=-"]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise UserError(f"cannot run {program} ({error.strerror})", "give --via plain") from error
    try:
        said, _ = process.communicate(listed)
    except BaseException:  # Ctrl-C: let it write down how far it is, which its own resuming needs
        process.terminate()
        process.wait(10)
        raise
    if process.returncode not in (0, _CHECKSUM_FAILED):
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        why = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "no message")
        raise UserError(
            f"aria2c gave up with code {process.returncode} ({why[:200]})",
            "check the network and run the same command again; it continues from there",
        )


def _entry(wanted: WantedFile) -> str:
    """Lines of aria2c's input; paths have no line breaks and addresses no blanks."""
    lines = [wanted.url, f"  out={wanted.path}"]
    if wanted.sha256:
        lines.append(f"  checksum=sha-256={wanted.sha256}")
    return "\n".join(lines) + "\n"
