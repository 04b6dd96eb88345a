"""A kit against itself: everything that is missing, extra, altered, renamed, of another form, or wrongly signed.

Needs the base installation alone; signatures need ssh-keygen.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ddtree.errors import UserError
from ddtree.kit import bag
from ddtree.kit.check_result import CheckResult
from ddtree.kit.names import fault_of, folded
from ddtree.kit.record import (
    ENVIRONMENT,
    EXPERIMENT,
    FETCH,
    KIT,
    PATCHES,
    PROCESS,
    VERIFY,
    EnvironmentRecord,
    ExperimentRecord,
    FetchList,
    KitRecord,
    PatchRecord,
    ProcessRecord,
    read_record,
)
from ddtree.kit.signature import can_verify, expected_files, verify

FAST_BYTES = 1 << 20
"""In fast mode, larger files are looked for and counted, and not read."""
_LARGEST_MANIFEST_BYTES = 256 << 20
_BAGIT_TXT = b"BagIt-Version: 0.97\nTag-File-Character-Encoding: UTF-8\n"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)")
_TAGS = (bag.BAG_INFO, bag.BAGIT, bag.MANIFEST)


def check_folder(
    folder: Path,
    *,
    is_fast: bool = False,
    allowed_signers: Path | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> CheckResult:
    """Check a kit that is a folder.

    Args:
        is_fast: do not read files above 1 MiB.
        allowed_signers: OpenSSH's list; a kit that nobody in it has signed is faulty then.
        tell: told bytes that were read, and of how many.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", "name a kit: a folder, a .tar.zst or a .zip")
    return _Check(folder, is_fast, allowed_signers, tell).run()


class _Check:
    def __init__(
        self, folder: Path, is_fast: bool, allowed_signers: Path | None, tell: Callable[[int, int], None]
    ) -> None:
        self._folder, self._is_fast, self._allowed, self._tell = folder, is_fast, allowed_signers, tell
        self._result = CheckResult()

    def run(self) -> CheckResult:
        result, folder = self._result, self._folder
        if not (folder / bag.TAG_MANIFEST).is_file() or not (folder / bag.MANIFEST).is_file():
            missing = [name for name in (bag.TAG_MANIFEST, bag.MANIFEST) if not (folder / name).is_file()]
            result.faults.append(f"missing: {' and '.join(missing)}, so this is no kit, or one that was never finished")
            return result
        there = self._walk()
        tags = self._tag_files(there)
        payload = self._manifest(bag.MANIFEST)
        signatures = self._signatures(there)
        known = {*tags, *payload, *signatures, bag.TAG_MANIFEST}
        missing = sorted(name for name in payload if name not in there)
        extra = sorted(name for name in there if name not in known)
        self._contents(payload, there)
        self._pair(missing, extra, payload)
        self._payload_size(there)
        if result.is_whole:
            self._forms()
        return result

    def _walk(self) -> dict[str, Path]:
        """Every file by its name; what is no plain file or folder is a fault."""
        found: dict[str, Path] = {}
        seen: dict[str, str] = {}
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                self._fault("extra", f"{name!a} is a link or a device")
            elif path.is_dir():
                if not any(path.iterdir()):
                    self._fault("extra", f"{name!a} is an empty folder")
            else:
                found[name] = path
                if (other := seen.setdefault(folded(name), name)) != name:
                    self._fault("extra", f"{name!a} and {other!a} are one file on some systems")
        return found

    def _tag_files(self, there: dict[str, Path]) -> set[str]:
        listed = self._manifest(bag.TAG_MANIFEST)
        if set(listed) != set(_TAGS):
            odd = sorted(set(listed) ^ set(_TAGS))
            self._fault("altered", f"{bag.TAG_MANIFEST} must list {', '.join(_TAGS)}, and differs in {', '.join(odd)}")
        for name in _TAGS:
            if name not in there:
                self._fault("missing", name)
            elif name in listed and bag.digest_of(there[name]) != listed[name]:
                self._fault("altered", name)
        if bag.BAGIT in there and there[bag.BAGIT].read_bytes() != _BAGIT_TXT:
            self._fault("altered", f"{bag.BAGIT} is not that of a bag of BagIt 0.97 in UTF-8")
        return set(_TAGS)

    def _manifest(self, name: str) -> dict[str, str]:
        """Hashes by file; a manifest that is not in the one form in which it is written is a fault."""
        path = self._folder / name
        if path.stat().st_size > _LARGEST_MANIFEST_BYTES:
            self._fault("altered", f"{name} is larger than any manifest")
            return {}
        raw = path.read_bytes()
        text = raw.decode("utf-8", "replace")
        found = {match[2]: match[1] for match in map(_LINE.fullmatch, text.split("\n")) if match}
        if bag.told_manifest(found).encode() != raw:
            self._fault("altered", f"{name} is not in the form in which it was written")
        for each in found:
            if (why := fault_of(each)) or (name == bag.MANIFEST and not each.startswith(f"{bag.PAYLOAD}/")):
                self._fault("altered", f"{name} names {each[:80]!a}, which {why or 'is outside of the payload'}")
        return found

    def _contents(self, payload: dict[str, str], there: dict[str, Path]) -> None:
        present = [name for name in payload if name in there]
        sizes = {name: there[name].stat().st_size for name in present}
        total, done = sum(sizes.values()), 0
        skipped = 0
        for name in present:
            if self._is_fast and sizes[name] > FAST_BYTES:
                skipped += 1
            elif bag.digest_of(there[name]) != payload[name]:
                self._fault("altered", name)
            done += sizes[name]
            self._tell(done, total)
        if skipped:
            self._result.unchecked.append(f"the content of {skipped} files above 1 MiB (fast mode)")
        self._result.files, self._result.total_bytes = len(present), total

    def _pair(self, missing: list[str], extra: list[str], payload: dict[str, str]) -> None:
        """A missing file whose content lies under another name was renamed."""
        by_digest: dict[str, str] = {}
        for name in extra if missing else ():
            by_digest.setdefault(bag.digest_of(self._folder / name), name)
        for name in missing:
            other = by_digest.pop(payload[name], None)
            if other is not None:
                extra.remove(other)
                self._fault("renamed", f"{name} is {other!a} now")
            else:
                self._fault("missing", name)
        for name in extra:
            self._fault("extra", f"{name!a}" if fault_of(name) else name)

    def _payload_size(self, there: dict[str, Path]) -> None:
        """Payload-Oxum, which sees a large file that was cut in fast mode too."""
        try:
            told = dict(bag.read_info(self._folder)).get("Payload-Oxum", "")
        except (OSError, UnicodeDecodeError):
            told = ""
        files = [path for name, path in there.items() if name.startswith(f"{bag.PAYLOAD}/")]
        seen = f"{sum(path.stat().st_size for path in files)}.{len(files)}"
        if told != seen:
            self._fault("altered", f"the payload has {seen} (bytes.files), {bag.BAG_INFO} says {told or 'nothing'}")

    def _signatures(self, there: dict[str, Path]) -> list[str]:
        try:
            expected = expected_files(self._folder)
        except (OSError, UnicodeDecodeError):
            expected = []
        for name in expected:
            if name not in there:
                self._fault("missing", f"{name}, the signature of a signer that {bag.BAG_INFO} names")
        names = [name for name in expected if name in there]
        if names and not can_verify():
            self._result.unchecked.append("signatures: there is no ssh-keygen on this machine")
            return expected
        for name in names:
            signature = verify(self._folder, there[name], self._allowed)
            self._result.signatures.append(signature)
            if not signature.is_good:
                self._fault("altered", f"{name}: {signature.trouble}")
        if self._allowed is not None and not any(each.signer for each in self._result.signatures):
            self._fault("unsigned", f"no signature is by anybody in {self._allowed}")
        return expected

    def _forms(self) -> None:
        """The files of ours, by their schema; only once it is known that nobody touched them."""
        payload = self._folder / bag.PAYLOAD
        kit = self._form(KitRecord, payload / KIT)
        self._result.kit = kit
        if kit is None:
            return
        for place in kit.places:
            folder = payload / place.folder
            try:
                tomllib.loads((folder / "deployment.toml").read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError):
                self._fault("form", f"{place.name!a} has no deployment.toml that can be read")
            for kind, name in _FORMS:
                if (folder / name).exists():
                    self._form(kind, folder / name)
            self._verdict(folder / VERIFY, place.verdict)
        for identity in kit.experiments:
            folder = payload / "experiments" / identity
            self._form(ExperimentRecord, folder / EXPERIMENT)
            for fault in _experiment_faults(folder):
                self._fault("altered", f"experiments/{identity}: {fault}")
        for name in (*kit.results, *kit.earlier):
            if not (payload / name).exists():
                self._fault("missing", f"{name}, which {KIT} names")

    def _form(self, kind: type[Any], path: Path) -> Any:
        try:
            return read_record(kind, path)
        except UserError as error:
            self._fault("form", f"{path.relative_to(self._folder)}: {error.cause}")
            return None

    def _verdict(self, path: Path, told: str) -> None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["verdict"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self._fault("form", f"{path.relative_to(self._folder)} holds no verdict")
            return
        if found != told:
            self._fault("form", f"{path.relative_to(self._folder)} says {found}, {KIT} says {told}")

    def _fault(self, kind: str, words: str) -> None:
        self._result.faults.append(f"{kind}: {words}")


_FORMS: tuple[tuple[type[BaseModel], str], ...] = (
    (ProcessRecord, PROCESS),
    (EnvironmentRecord, ENVIRONMENT),
    (PatchRecord, PATCHES),
    (FetchList, f"model/{FETCH}"),
    (FetchList, f"drafter/{FETCH}"),
)


def _experiment_faults(folder: Path) -> Iterator[str]:
    """An experiment's own manifest, with paths from its folder."""
    try:
        lines = (folder / bag.MANIFEST).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        yield f"{bag.MANIFEST} is missing"
        return
    top = folder.parents[1].resolve()
    for line in lines:
        digest, _, name = line.partition("  ")
        try:
            path = (folder / name).resolve()
            is_there = path.is_relative_to(top) and path.is_file()
        except (OSError, ValueError):  # no name at all
            is_there = False
        if not is_there:
            yield f"{name[:80]!a} is not in the kit"
        elif bag.digest_of(path) != digest:
            yield f"{name} is not as it was measured"
