"""Where weights come from: a hub repository at a revision, or a list of addresses with hashes."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from ddtree.errors import UserError
from ddtree.fetch.wanted import WantedFile, checked_path

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"[\w][\w./-]*")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class HubSource:
    """A repository of models and what of its history is wanted: a commit, or a branch or tag that names one now."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"


@dataclass(frozen=True)
class ListSource:
    """Attributes:
    name: of the list's file.
    sha256: of the list itself.
    files: what it lists.
    """

    name: str
    sha256: str
    files: tuple[WantedFile, ...]

    def __str__(self) -> str:
        return self.name


def parse_hub(text: str) -> HubSource:
    """``owner/name@revision``.

    Raises:
        UserError: it is something else, or says no revision.
    """
    repo, at, revision = text.partition("@")
    if not _REPO.fullmatch(repo):
        raise UserError(f"{text[:100]!r} is no repository of the hub", "write owner/name@revision, or give --urls FILE")
    if not at or not revision:
        raise UserError(
            f"{repo} without a revision could be another model tomorrow",
            f"write {repo}@COMMIT; {repo}@main takes today's commit and writes it down",
        )
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise UserError(f"{revision[:100]!r} is no revision", "write a commit, a tag or a branch")
    return HubSource(repo, revision)


def read_list(file: Path) -> ListSource:
    """A list: a line for each file with its address, its SHA-256 and, where the address does not end in it, its path.

    Raises:
        UserError: the list cannot be read, or a line is not of that form.
    """
    try:
        raw = file.read_bytes()
        lines = raw.decode("utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read the list {file} ({error.strerror})", "give --urls a file") from None
    except UnicodeDecodeError:
        raise UserError(f"the list {file} is not UTF-8 text", "write an address and its SHA-256 on each line") from None
    files: list[WantedFile] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        files.append(_read_line(words, f"{file}:{number}"))
    if not files:
        raise UserError(f"the list {file} names no file", "write an address and its SHA-256 on each line")
    paths = [each.path for each in files]
    folders = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    if both := sorted(folders & set(paths)):
        raise UserError(f"the list {file} names {both[0]} as a file and as a folder", "correct one of the paths")
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise UserError(f"the list {file} names {twice[0]} twice", "give each a path of its own in the third column")
    return ListSource(file.name, hashlib.sha256(raw).hexdigest(), tuple(files))


def _read_line(words: list[str], place: str) -> WantedFile:
    url = words[0]
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{place}: {url[:100]!r} is no http or https address", "begin each line with one")
    if parts.username or parts.password:
        raise UserError(f"{place}: the address holds a password, which would be written down", "leave it out")
    if len(words) < 2 or not _SHA256.fullmatch(words[1]):
        raise UserError(
            f"{place}: there is no SHA-256 after the address, so that nobody could tell a wrong file",
            "write: ADDRESS SHA256 [PATH]",
        )
    if len(words) > 3:
        raise UserError(f"{place}: there are {len(words)} words", "write: ADDRESS SHA256 [PATH]")
    path = words[2] if len(words) == 3 else unquote(parts.path.rsplit("/", 1)[-1])
    return WantedFile(checked_path(path, place), None, words[1].lower(), None, url)
