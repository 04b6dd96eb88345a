"""The wheel that an engine was installed from: what its files were before anybody edited them."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ddtree.errors import UserError
from ddtree.kit.engine_files import Interpreter

LARGEST_BYTES = 4 << 30


@dataclass(frozen=True)
class Wheel:
    """A released wheel.

    Attributes:
        sha256: of the file.
        hashes: of its files, dist-info and data left out, by path.
    """

    sha256: str
    name: str
    version: str
    hashes: dict[str, str]
    _content: bytes

    def content(self, path: str) -> bytes:
        """A file as released."""
        with zipfile.ZipFile(io.BytesIO(self._content)) as archive:
            return archive.read(path)


def read_wheel(content: bytes, told: str) -> Wheel:
    """Read one; the hashes are those of its RECORD, which are checked as files are read.

    Raises:
        UserError: it is no wheel.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
            lines = list(csv.reader(io.StringIO(archive.read(record).decode())))
            hashes = {}
            for line in lines:
                # There are releases whose RECORD does not quote paths with commas.
                path, digest = (",".join(line[:-2]), line[-2]) if len(line) > 2 else ("", "")
                if digest.startswith("sha256=") and ".dist-info/" not in path and ".data/" not in path:
                    hashes[path] = base64.urlsafe_b64decode(digest[7:] + "=" * (-len(digest[7:]) % 4)).hex()
            for path, digest in hashes.items():
                if hashlib.sha256(archive.read(path)).hexdigest() != digest:
                    raise UserError(f"{told} contradicts its own RECORD in {path}", "give the wheel as it was released")
    except (zipfile.BadZipFile, StopIteration, KeyError, ValueError, UnicodeDecodeError):
        raise UserError(f"{told} is no wheel", "give --wheel a .whl file") from None
    name, version = record.split("/")[0].removesuffix(".dist-info").split("-", 1)
    return Wheel(hashlib.sha256(content).hexdigest(), name.replace("_", "-").lower(), version, hashes, content)


def wheel_of_file(file: Path) -> Wheel:
    """One that lies here."""
    try:
        return read_wheel(file.read_bytes(), str(file))
    except OSError as error:
        raise UserError(f"cannot read {file} ({error.strerror})", "give --wheel a .whl file") from None


def released_wheel(interpreter: Interpreter, package: str, version: str) -> Wheel | str:
    """The wheel that the host's pip gets for this version; or why there is none."""
    made = interpreter.host.run("mktemp -d")
    folder = made.stdout.strip()
    if made.exit_code or not folder.startswith("/"):
        return f"no temporary folder on the host ({made.trouble})"
    try:
        code, _, complaints = interpreter.pip(
            *("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "15"),
            *("--dest", folder, f"{package}=={version}"),
        )
        if code:
            lines = [line for line in complaints.strip().splitlines() if line.strip()]
            return lines[-1].strip()[:200] if lines else f"pip ended with {code}"
        found = interpreter.host.run('cd -- "$1" && ls', folder).stdout.split()
        content = interpreter.host.read(f"{folder}/{found[0]}") if len(found) == 1 else None
        if content is None:
            return "pip brought no wheel"
        return read_wheel(content, found[0])
    finally:
        interpreter.host.run('rm -rf -- "$1"', folder)
