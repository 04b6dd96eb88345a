"""A kit as one file: the same folder always gives the same bytes."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ddtree.disk import sync_folder
from ddtree.errors import UserError
from ddtree.kit.names import checked

ENDINGS = (".tar.zst", ".zip")
_EPOCH_S = 315532800
"""1980-01-01, the first day that a zip can tell."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_LEVEL = 10
_FILE_MODE = 0o644


def ending_of(path: Path) -> str | None:
    """``.tar.zst`` or ``.zip``; None where the name has neither."""
    return next((ending for ending in ENDINGS if path.name.endswith(ending)), None)


def pack(folder: Path, out: Path) -> Path:
    """Write ``folder`` to ``out``, in the format of its ending: times, order, owners and modes are fixed.

    Raises:
        UserError: ``out`` is there already, has another ending, or cannot be written.
    """
    ending = ending_of(out)
    if ending is None:
        raise UserError(f"{out.name} has no ending of an archive", f"choose a name with {' or '.join(ENDINGS)}")
    if out.exists():
        raise UserError(f"{out} is there already", "give another place, or move it away")
    top = checked(out.name.removesuffix(ending))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    named = [(f"{top}/{path.relative_to(folder).as_posix()}", path) for path in files]
    for name, path in named:
        checked(name)
        if path.is_symlink():
            raise UserError(f"{name} is a link", "a kit has plain files only")
    with _appearing(out) as target:
        (_write_zip if ending == ".zip" else _write_tar)(named, target)
    return out


@contextmanager
def _appearing(out: Path) -> Iterator[BinaryIO]:
    draft = out.with_name(f".{out.name}.unfinished")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as target:
            yield target
            target.flush()
            os.fsync(target.fileno())
        draft.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        raise UserError(f"cannot write {out} ({error.strerror})", "give another place") from error
    finally:
        draft.unlink(missing_ok=True)


def _write_tar(named: list[tuple[str, Path]], target: BinaryIO) -> None:
    zstandard = require_zstandard()
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, threads=0)
    with (
        compressor.stream_writer(target, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name, path in named:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = path.stat().st_size, _EPOCH_S, _FILE_MODE
            with path.open("rb") as file:
                archive.addfile(member, file)


def _write_zip(named: list[tuple[str, Path]], target: BinaryIO) -> None:
    # Written where nothing can be gone back to, sizes would follow their file: more than plain readers take.
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9, strict_timestamps=True) as archive:
        for name, path in named:
            member = zipfile.ZipInfo(name, _EPOCH)
            member.compress_type, member.create_system = zipfile.ZIP_DEFLATED, 3
            member.external_attr = (0o100000 | _FILE_MODE) << 16
            member.file_size = path.stat().st_size
            with path.open("rb") as file, archive.open(member, "w") as into:
                while piece := file.read(io.DEFAULT_BUFFER_SIZE * 128):
                    into.write(piece)


def require_zstandard() -> Any:
    """The library that Python lacks until 3.14.

    Raises:
        UserError: it is not installed.
    """
    try:
        import zstandard
    except ImportError:
        raise UserError(".tar.zst needs ddtree[kit]", "pip install 'ddtree[kit]', or use .zip or a folder") from None
    return zstandard
