"""Archives from anywhere: plain files with plain names come out, into a folder of ours, and nothing else does."""

from __future__ import annotations

import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn

from ddtree.errors import UserError
from ddtree.kit.durable import appearing
from ddtree.kit.names import fault_of, folded
from ddtree.kit.pack import ENDINGS, ending_of, require_zstandard

MOST_FILES = 200_000
MOST_BYTES = 64 << 30
MOST_RATIO = 200
"""Bytes out for a byte in, above the first 64 MiB."""
_FREE_BYTES = 64 << 20
_WINDOW_BYTES = 128 << 20
_PIECE_BYTES = 1 << 20


def unpack(archive: Path, place: Path, *, most_bytes: int = MOST_BYTES) -> Path:
    """Put a packed kit in place as a folder; all of it or nothing.

    Raises:
        UserError: the archive is damaged, or holds what no kit holds; nothing is left.
    """
    if ending_of(archive) is None:
        raise UserError(f"{archive.name} is neither {' nor '.join(ENDINGS)}", "name a kit")
    with appearing(place) as draft:
        extract(archive, draft, most_bytes=most_bytes)
    return place


def extract(archive: Path, folder: Path, *, most_bytes: int = MOST_BYTES) -> None:
    """Write an archive's files into ``folder``, which is empty; their common top folder is left out.

    Raises:
        UserError: as :func:`unpack`; what was written stays within ``folder``.
    """
    try:
        with archive.open("rb") as file:
            reader = _Extraction(archive, folder, file, most_bytes)
            reader.zip(file) if ending_of(archive) == ".zip" else reader.tar(file)
    except OSError as error:
        raise UserError(f"cannot unpack {archive} ({error.strerror or error})", "check the file and the disk") from None


class _Member(tarfile.TarInfo):
    """A member of the plainest kind; what extends names, links, or leaves holes is refused before it is read."""

    def _proc_member(self, archive: Any) -> Any:
        if self.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            raise _Refused(f"it has a member of kind {self.type!r}: a link, a device, or an extension")
        return super()._proc_member(archive)  # type: ignore[misc]


class _Refused(Exception):
    """What no kit holds."""


class _Extraction:
    def __init__(self, archive: Path, folder: Path, file: BinaryIO, most_bytes: int) -> None:
        self._archive, self._folder = archive, folder
        packed = os.fstat(file.fileno()).st_size
        self._most = min(most_bytes, max(_FREE_BYTES, packed * MOST_RATIO))
        self._written = self._files = 0
        self._seen: set[str] = set()
        self._folders: set[str] = set()
        self._top: str | None = None

    def tar(self, file: BinaryIO) -> None:
        zstandard = require_zstandard()
        decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        try:
            with (
                decompressor.stream_reader(file, read_across_frames=False, closefd=False) as stream,
                tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive,
            ):
                for member in archive:
                    if member.issparse():
                        raise _Refused(f"{member.name[:80]!a} has holes")
                    if member.isdir():
                        self._name(member.name)
                        continue
                    content = archive.extractfile(member)
                    assert content is not None
                    self._write(member.name, content, member.size)
            if file.read(1):
                raise _Refused("something follows its end")
        except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
            self._damaged(error)
        except _Refused as refused:
            self._refuse(refused)
        self._require_content()

    def zip(self, file: BinaryIO) -> None:
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                if sum(member.file_size for member in members) > self._most:
                    raise _Refused("it would unpack to more than an archive of its size can hold")
                for member in members:
                    self._member(archive, member)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
            self._damaged(error)
        except _Refused as refused:
            self._refuse(refused)
        self._require_content()

    def _member(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
        kind = member.external_attr >> 28
        if member.flag_bits & 0x1:
            raise _Refused(f"{member.filename[:80]!a} is encrypted")
        if member.create_system == 3 and kind not in (0, 0o10, 0o4):
            raise _Refused(f"{member.filename[:80]!a} is a link or a device")
        if member.orig_filename != member.filename:
            raise _Refused(f"the name {member.orig_filename[:80]!a} is not what it seems")
        if member.is_dir():
            self._name(member.filename.rstrip("/"))
            return
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _Refused(f"{member.filename[:80]!a} is compressed in an unusual way")
        with archive.open(member) as content:
            self._write(member.filename, content, member.file_size)

    def _name(self, name: str) -> str:
        """The path below the top folder; empty for that folder itself."""
        if why := fault_of(name):
            raise _Refused(f"the name {name[:80]!a} {why}")
        top, _, rest = name.partition("/")
        if self._top is None:
            self._top = top
        if top != self._top:
            raise _Refused(f"{name[:80]!a} lies beside the kit's folder {self._top!a}")
        return rest

    def _write(self, name: str, content: IO[bytes], size: int) -> None:
        rest = self._name(name)
        if not rest:
            raise _Refused(f"{name[:80]!a} is a file where the kit's folder should be")
        self._claim(rest)
        if size > self._most - self._written:
            raise _Refused("it would unpack to more than an archive of its size can hold")
        path = self._folder / rest
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(path, flags, 0o644), "wb") as target:
            written = 0
            for piece in _pieces(content):
                written += len(piece)
                if written > size:
                    raise _Refused(f"{name[:80]!a} is larger than it says")
                target.write(piece)
        if written != size:
            raise _Refused(f"{name[:80]!a} is shorter than it says")
        self._written += written

    def _claim(self, rest: str) -> None:
        """A file may be there once, in every spelling that a system takes for the same."""
        key = folded(rest)
        parents = {key.rsplit("/", n)[0] for n in range(1, key.count("/") + 1)}
        if key in self._seen or key in self._folders or parents & self._seen:
            raise _Refused(f"{rest[:80]!a} is there twice, or is a file and a folder")
        self._seen.add(key)
        self._folders |= parents
        self._files += 1
        if self._files > MOST_FILES:
            raise _Refused(f"it has more than {MOST_FILES} files")

    def _require_content(self) -> None:
        if not self._files:
            raise UserError(f"{self._archive} holds no file", "name a kit")

    def _damaged(self, error: Exception) -> NoReturn:
        told = str(error) or type(error).__name__
        raise UserError(f"{self._archive} is damaged ({told})", "fetch it again") from None

    def _refuse(self, refused: _Refused) -> NoReturn:
        raise UserError(f"{self._archive} is refused: {refused}", "trust nothing from where it came") from None


def _pieces(content: IO[bytes]) -> Iterator[bytes]:
    while piece := content.read(_PIECE_BYTES):
        yield piece
