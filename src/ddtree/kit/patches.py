"""Files of the engine's package that are not as released: whole, and as a diff that ``git apply`` takes."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ddtree.kit.engine_files import Interpreter
from ddtree.kit.mask import Masker
from ddtree.kit.names import checked
from ddtree.kit.record import PATCHES, PatchedFile, PatchRecord
from ddtree.kit.wheel import Wheel, released_wheel

LARGEST_PATCH_BYTES = 8 << 20
PACKAGE = {"native": "ddtree", "sglang": "sglang", "vllm": "vllm"}


def capture_patches(
    interpreter: Interpreter | None,
    engine: str,
    folder: Path,
    masker: Masker,
    inside: str,
    wheel: Wheel | None = None,
    *,
    may_download: bool = True,
) -> PatchRecord:
    """Write ``patches/`` below ``folder`` and tell what is in it.

    Args:
        inside: ``folder`` as the account of masked secrets calls it.
        wheel: as released; if None, what the host's pip gets.
    """
    package = PACKAGE[engine]
    record = _compare(interpreter, package, folder, masker, inside, wheel, may_download)
    path = folder / PATCHES
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return record


def _compare(
    interpreter: Interpreter | None,
    package: str,
    folder: Path,
    masker: Masker,
    inside: str,
    wheel: Wheel | None,
    may_download: bool,
) -> PatchRecord:
    if interpreter is None:
        return PatchRecord(package=package, version=None, base="none", notes=["no interpreter was found to ask"])
    seen = interpreter.changes(package, {}, 0)
    if seen is None or not seen["found"]:
        return PatchRecord(package=package, version=None, base="none", notes=[f"{package} is not installed there"])
    version, notes = str(seen["version"]), []
    if seen["origin"] == "editable":
        notes = [f"{package} {version} runs from a checkout: there is no release to compare with"]
        return PatchRecord(package=package, version=version, base="none", notes=notes)
    if wheel is not None and (wheel.name, wheel.version) != (package, version):
        notes.append(f"the given wheel is {wheel.name} {wheel.version}, installed is {version}: it was not used")
        wheel = None
    if wheel is None and may_download:
        got = released_wheel(interpreter, package, version)
        if isinstance(got, Wheel):
            wheel = got
        else:
            notes.append(f"the released wheel was not to be had ({got})")
    told = interpreter.changes(package, wheel.hashes if wheel else {}, LARGEST_PATCH_BYTES)
    assert told is not None
    if not told["compared"]:
        notes.append(f"{package} {version} has no RECORD: nothing to compare with")
        return PatchRecord(package=package, version=version, base="none", notes=notes)
    files = [_keep(change, package, folder, masker, inside, notes) for change in told["changes"]]
    if files and wheel is not None:
        trouble = _write_diff(files, folder, wheel, package)
        if trouble:
            notes.append(trouble)
    elif files:
        notes.append("without the released wheel there is no base to make a diff from: full files only")
    return PatchRecord(
        package=package,
        version=version,
        base="wheel" if wheel else "RECORD",
        wheel_sha256=wheel.sha256 if wheel else None,
        files=files,
        notes=notes,
    )


def _keep(
    change: dict[str, Any], package: str, folder: Path, masker: Masker, inside: str, notes: list[str]
) -> PatchedFile:
    """Put the file itself into the kit."""
    path = checked(change["path"])
    sealed, is_masked = change["now"], False
    if change["content"] is not None:
        raw = base64.b64decode(change["content"])
        place = f"patches/full/{path}"
        content = masker.content(raw, f"{inside}{place}")
        is_masked = content != raw
        sealed = hashlib.sha256(content).hexdigest()
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(content)
    elif change["change"] != "deleted":
        notes.append(f"{path} is larger than {LARGEST_PATCH_BYTES >> 20} MiB: only its hash is kept")
    return PatchedFile(
        path=path,
        package=package,
        change=change["change"],
        base_sha256=change["base"],
        sealed_sha256=sealed,
        is_masked=is_masked,
    )


def _write_diff(files: list[PatchedFile], folder: Path, wheel: Wheel, package: str) -> str | None:
    """``patches/diffs/PACKAGE.diff``, relative to site-packages; tells why there is none."""
    git = shutil.which("git")
    if git is None:
        return "there is no git on this machine: full files only, no diff"
    with tempfile.TemporaryDirectory(prefix="ddtree-kit-") as scratch:
        for each in files:
            if each.base_sha256 is not None:
                _put(Path(scratch) / "a" / each.path, wheel.content(each.path))
            full = folder / "patches" / "full" / each.path
            if full.exists():
                _put(Path(scratch) / "b" / each.path, full.read_bytes())
        for side in ("a", "b"):
            (Path(scratch) / side).mkdir(exist_ok=True)
        clean = {"PATH": os.environ.get("PATH", ""), "HOME": scratch, "LC_ALL": "C"}
        clean |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        words = [git, "-c", "core.autocrlf=false", "-c", "core.quotepath=false", "diff", "--no-index", "--no-prefix"]
        words += ["--binary", "--full-index", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv", "a", "b"]
        done = subprocess.run(words, cwd=scratch, env=clean, capture_output=True, timeout=120, check=False)
    if done.returncode != 1:
        return f"git made no diff ({done.stderr.decode(errors='replace').strip()[:200] or 'no difference'})"
    _put(folder / "patches" / "diffs" / f"{package}.diff", done.stdout)
    return None


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
