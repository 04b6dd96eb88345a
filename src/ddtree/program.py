"""Which program runs: its commit, and the versions of what it runs with."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ddtree


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Of ddtree, of Python, and of packages, where they are installed beside it."""
    found: dict[str, str | None] = {"ddtree": ddtree.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


@cache
def commit() -> str | None:
    """The commit of the checkout that the package runs from, with a mark where files were changed; else None."""
    root = Path(ddtree.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() or None
