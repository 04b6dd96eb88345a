"""The hash that names a model folder's configuration."""

from __future__ import annotations

import hashlib
from pathlib import Path


def config_sha256(folder: str) -> str | None:
    """Of ``config.json``; None where this machine has no such folder."""
    try:
        return hashlib.sha256((Path(folder) / "config.json").read_bytes()).hexdigest()
    except OSError:
        return None
