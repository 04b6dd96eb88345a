"""A kit's folder as a BagIt bag (RFC 8493): sealed with the library, its manifests in one form only.

One form, byte for byte, is what lets :mod:`ddtree.kit.check` see a flipped bit in the manifests themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import ddtree
from ddtree.disk import write_whole
from ddtree.kit.durable import sync_tree
from ddtree.kit.names import checked

PAYLOAD = "data"
MANIFEST, TAG_MANIFEST = "manifest-sha256.txt", "tagmanifest-sha256.txt"
BAG_INFO, BAGIT = "bag-info.txt", "bagit.txt"
SIGNATURES = "signatures"
SIGNED_BY = "Signed-By"
_PIECE_BYTES = 4 << 20


def seal(folder: Path, info: Mapping[str, str | list[str]]) -> None:
    """Make a bag of ``folder``, whose content is the payload.

    Raises:
        UserError: a file's name is not plain.
    """
    import bagit  # type: ignore[import-untyped]

    for path in sorted(folder.rglob("*")):
        if path.is_file():
            checked(f"{PAYLOAD}/{path.relative_to(folder).as_posix()}")
    _drop_empty(folder)
    # The library removes nothing, but its own temporary folder's name must not collide: a kit has no such file.
    bagit.make_bag(
        str(folder),
        bag_info={"Bag-Software-Agent": f"ddtree {ddtree.__version__}", **info},
        checksums=["sha256"],
        processes=1,
    )
    manifest = {name: digest for digest, name in _lines(folder / MANIFEST)}
    (folder / MANIFEST).write_text(told_manifest(manifest), encoding="utf-8", newline="\n")
    seal_tags(folder)


def seal_tags(folder: Path) -> None:
    """Write the manifest of tag files anew; it comes last and makes the bag whole."""
    sync_tree(folder)
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != TAG_MANIFEST)
    digests = {name: digest_of(folder / name) for name in names}
    write_whole(folder / TAG_MANIFEST, told_manifest(digests))


def told_manifest(digests: Mapping[str, str]) -> str:
    """The text of a manifest: lines that ``sha256sum -c`` reads, by name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def read_info(folder: Path) -> list[tuple[str, str]]:
    """The fields of ``bag-info.txt``, in order."""
    pairs = []
    for line in (folder / BAG_INFO).read_text(encoding="utf-8").splitlines():
        name, colon, value = line.partition(": ")
        if colon:
            pairs.append((name, value))
    return pairs


def write_info(folder: Path, pairs: list[tuple[str, str]]) -> None:
    """Write ``bag-info.txt``; afterwards the tags must be sealed."""
    write_whole(folder / BAG_INFO, "".join(f"{name}: {value}\n" for name, value in pairs))


def digest_of(path: Path) -> str:
    """SHA-256, in hexadecimal."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            found.update(piece)
    return found.hexdigest()


def _lines(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(digest, name.lstrip()) for digest, _, name in (line.partition(" ") for line in lines)]


def _drop_empty(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
