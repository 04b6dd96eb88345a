"""Which commit of a hub repository a folder of weights holds, by what stands on the disk that the engine reads from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from ddtree.fetch.lock_file import LOCK_NAME, LockFile

ReadFile = Callable[[str], bytes | None]
"""A file of the server's machine; None where there is none. Raises UserError where it cannot be read."""

_SNAPSHOT = re.compile(r"models--(.+?)/snapshots/([0-9a-f]{40})(?:/|$)")


@dataclass(frozen=True)
class Seen:
    """Attributes:
    commit: of the repository; None where the folder does not tell.
    source: where it stands, or why it is not known, for people.
    is_altered: the folder is not what its lock file says.
    """

    commit: str | None
    source: str
    is_altered: bool = False


def commit_of(folder: str, read: ReadFile | None) -> Seen:
    """The commit, by the path of the hub's cache or by the lock file of `ddtree fetch`.

    The lock is believed where the small `config.json` still has the hash that stands in it; the weights are not read,
    which is what `ddtree fetch --check` is for.
    """
    if found := _SNAPSHOT.search(folder):
        return Seen(found[2], "path of the snapshot in the hub's cache")
    if read is None:
        return Seen(None, f"the files of {folder} cannot be read from here")
    raw = read(f"{folder}/{LOCK_NAME}")
    if raw is None:
        return Seen(None, f"{folder} has no {LOCK_NAME}")
    try:
        lock = LockFile.model_validate_json(raw)
    except ValidationError:
        return Seen(None, f"{folder}/{LOCK_NAME} is damaged")
    if lock.source.revision is None:
        return Seen(None, f"{LOCK_NAME} tells of {lock.source.name}, which has no commits")
    name = "config.json"
    locked = next((file.sha256 for file in lock.files if file.path == name), None)
    config = read(f"{folder}/{name}")
    if locked is None or config is None or hashlib.sha256(config).hexdigest() != locked:
        return Seen(lock.source.revision, f"{name} is not the one that {LOCK_NAME} tells of", is_altered=True)
    return Seen(lock.source.revision, f"{LOCK_NAME} of {lock.source.name}, with this {name}")
