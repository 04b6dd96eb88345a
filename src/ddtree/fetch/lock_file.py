"""What was fetched, file by file, with hash, size, source and revision; written when all of it is verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ddtree.disk import write_whole
from ddtree.errors import UserError
from ddtree.fetch.wanted import checked_path

LOCK_NAME = "ddtree-fetch.lock.json"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LockedFile(_Strict):
    """One file."""

    path: str
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    url: str

    @field_validator("path")
    @classmethod
    def _inside(cls, value: str) -> str:
        try:
            return checked_path(value, "the lock")
        except UserError as error:
            raise ValueError(error.cause) from None


class LockedSource(_Strict):
    """Where the files came from.

    Attributes:
        repo, asked_revision, revision: of a hub repository; ``revision`` is the commit.
        list_sha256: of a list of addresses.
        include, exclude: patterns that chose among the source's files.
    """

    kind: Literal["hub", "urls"]
    name: str
    asked_revision: str | None = None
    revision: str | None = None
    list_sha256: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


class LockFile(_Strict):
    """The whole of it."""

    format: Literal[1] = 1
    tool: str
    fetched_unix_s: float
    source: LockedSource
    files: tuple[LockedFile, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def read_lock(folder: Path) -> LockFile:
    """The lock file of a folder.

    Raises:
        UserError: there is none, or it is none of ours.
    """
    path = folder / LOCK_NAME
    try:
        return LockFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror})", "name a folder that ddtree fetch has filled"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "content"
        raise UserError(f"{path} is damaged ({place}: {first['msg']})", "fetch again, which writes it anew") from None


def write_lock(folder: Path, lock: LockFile) -> Path:
    """Write it in whole or not at all."""
    path = folder / LOCK_NAME
    try:
        write_whole(path, json.dumps(lock.model_dump(mode="json", exclude_none=True), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror})", "free some space, and fetch again") from error
    return path
