"""Our own download, where there is no aria2c: one connection a file, several files at once."""

from __future__ import annotations

from pathlib import Path

import httpx

from ddtree.demo.download import Connection, PinnedFile, download
from ddtree.demo.progress import silent
from ddtree.errors import UserError
from ddtree.fetch.wanted import WantedFile

_TIMEOUT_S = 20.0


def size_of(wanted: WantedFile) -> int:
    """Bytes of a file by its server's account.

    Raises:
        UserError: the server does not tell.
    """
    headers = {"Accept-Encoding": "identity", "Range": "bytes=0-0"}
    try:
        with (
            httpx.Client(timeout=_TIMEOUT_S, follow_redirects=True) as client,
            client.stream("GET", wanted.url, headers=headers) as response,
        ):
            status = response.status_code
            told = response.headers.get("Content-Range", "").rpartition("/")[2]
            length = told if status == httpx.codes.PARTIAL_CONTENT else response.headers.get("Content-Length", "")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"{wanted.url} cannot be reached ({error or type(error).__name__})", "check address and network"
        ) from None
    if status == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:  # the answer to a range of an empty file
        return 0
    if status not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
        raise UserError(f"{wanted.url} answers {status}", "correct the address in the list")
    if not length.isdigit():
        raise UserError(f"the server does not tell the size of {wanted.url}", "install aria2c, which can do without")
    return int(length)


def download_plain(wanted: WantedFile, staging: Path) -> Path:
    """Bring a file into ``staging``, going on from what is there.

    Raises:
        UserError: the network fails (what came stays), or the content is another one (it is deleted).
    """
    assert wanted.sha256 is not None and wanted.size_bytes is not None
    if wanted.size_bytes == 0:  # nothing to ask for
        (staging / wanted.path).touch()
        return staging / wanted.path
    pinned = PinnedFile(wanted.path, wanted.size_bytes, wanted.sha256)
    try:
        return download(pinned, wanted.url, staging, Connection(), silent)
    except UserError as error:
        if isinstance(error.__cause__, OSError):
            raise UserError(f"the disk is full at {wanted.path}", "free some space, or choose another --to") from error
        if "not the expected file" in error.cause:
            raise wrong_content(wanted) from error
        raise


def wrong_content(wanted: WantedFile) -> UserError:
    """What is said of a file that does not have its pinned hash; it has been deleted."""
    return UserError(
        f"{wanted.path} came with other content than its hash says, and was deleted",
        "run the same command again; if it happens twice, the server or the list is wrong",
    )
