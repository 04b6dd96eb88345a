"""Hashes of the wheels that an index serves for what is installed, asked of the host's own pip."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from ddtree.kit.engine_files import Interpreter
from ddtree.kit.record import Package

_MISSING = re.compile(r"No matching distribution found for ([A-Za-z0-9_.\-]+)==")
_MOST_TRIES = 30


def with_hashes(interpreter: Interpreter, packages: Sequence[Package]) -> tuple[list[Package], str | None]:
    """The packages with their wheels' hashes where an index has them; and why not, where none was had.

    pip resolves for the host's own platform and downloads metadata only, where the index offers that.
    """
    wanted = {each.name: each for each in packages if each.origin in ("index", "unknown")}
    hashes: dict[str, str] = {}
    why = None
    for _ in range(_MOST_TRIES):
        if not wanted:
            break
        code, output, complaints = interpreter.pip(
            *("install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--only-binary", ":all:"),
            *("--retries", "1", "--timeout", "15", "--report", "-"),
            *(f"{each.name}=={each.version}" for each in wanted.values()),
        )
        if code == 0:
            hashes = _hashes_in(output)
            break
        missing = {_plain(name) for name in _MISSING.findall(complaints)} & wanted.keys()
        lines = complaints.strip().splitlines()
        why = lines[-1][:200] if lines else f"pip ended with {code}"
        if not missing or len(missing) == len(wanted):
            break
        for name in missing:
            del wanted[name]
    found = [each.model_copy(update={"wheel_sha256": hashes.get(each.name)}) for each in packages]
    return found, None if hashes else why or "no package is from an index"


def requirements(packages: Sequence[Package]) -> str:
    """For ``pip install --require-hashes --no-deps -r``: what has a hash."""
    lines = [f"{each.name}=={each.version} --hash=sha256:{each.wheel_sha256}" for each in packages if each.wheel_sha256]
    return "".join(f"{line}\n" for line in lines)


def freeze(packages: Sequence[Package]) -> str:
    """Everything, for people; what has no hash is marked."""
    marks = {True: "", False: "  # no hash"}
    return "".join(
        f"{each.name}=={each.version}{marks[each.wheel_sha256 is not None]}"
        f"{'' if each.origin == 'index' else f'  # {each.origin}'}\n"
        for each in packages
    )


def _hashes_in(report: str) -> dict[str, str]:
    told = json.loads(report[report.index("{") :])
    found = {}
    for each in told.get("install", ()):
        digest = each.get("download_info", {}).get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest:
            found[_plain(each["metadata"]["name"])] = digest
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
