"""How a server that a benchmark started is ended."""

import subprocess
from typing import Any


def end(process: "subprocess.Popen[Any]", patience_s: float) -> None:
    """Ask it to end, and kill it where it does not within so many seconds."""
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
