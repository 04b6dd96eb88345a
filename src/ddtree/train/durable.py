"""Files that appear whole or not at all, whatever ends the process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ddtree.disk import UNFINISHED, sync_folder
from ddtree.errors import UserError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` at the end of the block: readers see the old one or the new.

    Raises:
        UserError: the disk is full, or the file cannot be written; what was half written is gone.
    """
    draft = path.with_name(path.name + UNFINISHED)
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        _remove(draft)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space left for {path}", "free some and run the same command again, train run with --resume"
            ) from error
        raise UserError(
            f"cannot write {path} ({error.strerror or error})", "check the disk and the rights, then run it again"
        ) from error
    except BaseException:
        _remove(draft)
        raise


def replace_json(path: Path, value: Any) -> None:
    """Write a JSON file in place of what stood there; raises as `replacing` does."""
    with replacing(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
