"""Run the command as a person does: another process, its output and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys


def ddtree(*arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddtree", *arguments],
        input=text,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=280,
        check=False,
        env={**os.environ, "COLUMNS": "60", **environment},
    )


def is_one_line_for_the_user(result: subprocess.CompletedProcess[str], *words: str) -> bool:
    """Exit 2, nothing on stdout, and one last line on stderr that has all ``words``."""
    lines = result.stderr.strip().splitlines()
    stages = [line for line in lines if line.endswith(" ...")]
    assert result.returncode == 2, result
    assert result.stdout == "", result
    assert "Traceback" not in result.stderr, result.stderr
    assert len(lines) - len(stages) == 1, result.stderr
    assert all(word in lines[-1] for word in words), result.stderr
    return True
