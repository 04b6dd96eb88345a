"""Where ddtree keeps what it can make again: the user's cache folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ddtree.errors import UserError


def cache_folder() -> Path:
    """``DDTREE_CACHE``, else ``XDG_CACHE_HOME``/ddtree, else the platform's own place for caches."""
    if chosen := os.environ.get("DDTREE_CACHE"):
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError as error:
            raise UserError(
                f"DDTREE_CACHE is {chosen}, whose home folder is not known", "set it to a path without '~'"
            ) from error
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG rules say to ignore a relative path
        return Path(xdg) / "ddtree"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise UserError(
            "no home folder to keep the model in", "set DDTREE_CACHE to a folder with 400 MB free"
        ) from error
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "ddtree"
