"""A download that survives interruptions: a ``.part`` file grows over any number of runs until its hash is right."""

from __future__ import annotations

import errno
import hashlib
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import httpx

from ddtree.demo.cache import require_space
from ddtree.demo.progress import Progress
from ddtree.errors import UserError

_PIECE_BYTES = 1 << 18
_FRUITLESS_TRIES = 3
_PAUSE_S = 1.0
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class PinnedFile:
    """A file known beforehand, to the byte."""

    name: str
    size_bytes: int
    sha256: str


class Unreachable(UserError):
    """Not one byte came: perhaps another way works."""


@dataclass(frozen=True)
class Connection:
    """How to reach the network, where the user has settings for it (httpx reads proxy variables by itself)."""

    proxy: str | None = None
    verify: ssl.SSLContext | bool = True


def download(wanted: PinnedFile, url: str, folder: Path, connection: Connection, on_progress: Progress) -> Path:
    """Bring ``wanted`` into ``folder``, going on from what earlier runs left there.

    Raises :class:`UserError` where the network fails (what came so far stays, for the next run), where the disk is
    full or the content is wrong (what came is deleted).
    """
    path, part = folder / wanted.name, folder / (wanted.name + ".part")
    stage = f"downloading {wanted.name} ({wanted.size_bytes / 1e6:.0f} MB)"
    if part.exists() and part.stat().st_size > wanted.size_bytes:
        part.unlink()
    require_space(folder, wanted.size_bytes - _size(part))

    fruitless, furthest = 0, _size(part)
    while (have := _size(part)) < wanted.size_bytes:
        try:
            with _pieces(url, have, connection) as (start, pieces), part.open("r+b" if part.exists() else "wb") as file:
                file.seek(start)
                if start < have:
                    file.truncate()
                for piece in pieces:
                    file.write(piece)
                    if file.tell() > wanted.size_bytes:
                        break  # not the file we want; the hash says so below
                    on_progress(stage, file.tell() / wanted.size_bytes)
        except httpx.HTTPError as error:
            failure = str(error) or type(error).__name__
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                part.unlink(missing_ok=True)
                raise UserError(f"the disk of {folder} is full", "free some space, or set DDTREE_CACHE") from error
            raise
        else:
            failure = "the server sent less than the whole file"
        fruitless = 0 if _size(part) > furthest else fruitless + 1
        furthest = max(furthest, _size(part))
        if fruitless == _FRUITLESS_TRIES:
            raise (UserError if furthest else Unreachable)(
                f"the download of {wanted.name} broke off at {_size(part) / 1e6:.0f} of"
                f" {wanted.size_bytes / 1e6:.0f} MB ({failure})",
                "check the network and run the same command again; it continues from there",
            )
        time.sleep(fruitless * _PAUSE_S)
    return keep_if_genuine(wanted, part, path)


def keep_if_genuine(wanted: PinnedFile, candidate: Path, path: Path) -> Path:
    """Rename ``candidate`` to ``path`` if it is the pinned file, delete it otherwise."""
    with candidate.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted.sha256:
        candidate.unlink()
        raise UserError(
            f"the downloaded {wanted.name} is not the expected file (SHA-256 {found[:12]}..., expected"
            f" {wanted.sha256[:12]}...) and was deleted",
            "run the same command again; if it happens twice, your package index serves another file",
        )
    return candidate.rename(path)


@contextmanager
def _pieces(url: str, start: int, connection: Connection) -> Iterator[tuple[int, Iterator[bytes]]]:
    """The content of ``url`` from byte ``start`` on, and the byte it really starts from (0 if it cannot resume)."""
    if urlsplit(url).scheme == "file":
        with Path(url2pathname(urlsplit(url).path)).open("rb") as file:
            file.seek(start)
            yield start, iter(lambda: file.read(_PIECE_BYTES), b"")
        return
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        client = httpx.Client(
            proxy=connection.proxy, verify=connection.verify, timeout=_TIMEOUT_S, follow_redirects=True, headers=headers
        )
    except (ValueError, ImportError, httpx.InvalidURL) as error:  # a proxy that httpx cannot use; perhaps pip can
        raise Unreachable(f"the proxy cannot be used ({error})", "correct the proxy settings") from error
    with client, client.stream("GET", url) as response:
        if response.status_code == httpx.codes.PARTIAL_CONTENT:
            continues = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
            if not continues:
                raise httpx.RemoteProtocolError("the server answered with another range than asked for")
        elif response.status_code == httpx.codes.OK:
            start = 0
        else:
            raise httpx.RemoteProtocolError(f"the server answered {response.status_code} {response.reason_phrase}")
        yield start, response.iter_raw()  # no piece size: waiting to fill one would lose its start when the line breaks


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
