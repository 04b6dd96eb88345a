"""Weights by name, size and hash: what a kit needs to know of them in order to do without them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Literal

from ddtree.deploy.host import Host
from ddtree.deploy.sections import Weights
from ddtree.errors import UserError
from ddtree.fetch.lock_file import LOCK_NAME, LockFile
from ddtree.kit.mask import Masker
from ddtree.kit.names import checked, fault_of
from ddtree.kit.record import FETCH, FetchList, WeightFile

HASHING_S = 6 * 3600.0
LARGEST_KEPT_BYTES = 1 << 20
_KEPT = (".json", ".md", ".txt", ".jinja", ".py", ".yaml", ".yml", ".model")
_TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
_HUB = "https://huggingface.co"

_LIST = 'cd -- "$1" && find -L . -type f ! -path "*/.*" -exec wc -c {} + | sed "/ total$/d"'
_PIECE = 'tail -c "+$2" -- "$1" | head -c "$3" | base64'
_PIECE_BYTES = 32 << 20
_HASH = 'cd -- "$1" && shift && sha256sum -- "$@"'


def capture_weights(
    host: Host,
    weights: Weights,
    folder: Path,
    masker: Masker,
    inside: str,
    *,
    is_demo: bool = False,
    include: bool = False,
) -> FetchList:
    """Write ``fetch.json`` and the small files of a weights folder into ``folder``.

    Args:
        include: the weights too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if is_demo:
        found = FetchList(source="demo", notes=["the service fetches the demo's pair itself, and checks its hashes"])
    elif weights.path is None:
        notes = ["the engine fetches it itself, at this revision"]
        found = FetchList(source="hub", repo=weights.hub, revision=weights.revision, notes=notes)
    else:
        found = _of_folder(host, weights, weights.path, folder, masker, inside, include)
    (folder / FETCH).write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return found


def _of_folder(
    host: Host, weights: Weights, path: str, folder: Path, masker: Masker, inside: str, include: bool
) -> FetchList:
    listed = host.run(_LIST, path, privileged=True, timeout_s=300)
    if listed.exit_code:
        raise UserError(f"cannot list {path} on {host.name} ({listed.trouble})", "check the folder and its rights")
    sizes: dict[str, int] = {}
    for line in listed.stdout.splitlines():
        told_size, _, rest = line.strip().partition(" ")
        name = rest.strip().removeprefix("./")
        if name != LOCK_NAME and not name.endswith(".unfinished"):
            sizes[checked(name)] = int(told_size)
    lock = _lock(host, path)
    notes: list[str] = []
    hashes, urls = _locked(lock, sizes)
    missing = [name for name in sizes if name not in hashes]
    if hashes:
        notes.append(f"hashes of {len(hashes)} files are those of {LOCK_NAME}, which ddtree fetch had verified")
    hashes |= _hashed(host, path, missing)
    kept = {name for name, size in sizes.items() if include or _is_kept(name, size)}
    files = []
    for name, size in sorted(sizes.items()):
        in_kit = False
        if name in kept and _is_kept(name, size):
            in_kit = _keep(host, f"{path}/{name}", folder / name, masker, f"{inside}{name}")
        elif name in kept:
            _bring(host, f"{path}/{name}", folder / name, size)
            in_kit = True
        url = urls.get(name) or _hub_url(weights, name)
        files.append(WeightFile(path=name, size_bytes=size, sha256=hashes[name], url=url, in_kit=in_kit))
    source, repo, revision = _source(weights, lock, files)
    return FetchList(source=source, path=path, repo=repo, revision=revision, files=files, notes=notes)


def _is_kept(name: str, size: int) -> bool:
    return size <= LARGEST_KEPT_BYTES and name.endswith(_KEPT) and name.rsplit("/", 1)[-1] not in _TOKENIZER


def _bring(host: Host, source: str, place: Path, size: int) -> None:
    """Copy a large file, piece by piece; weights hold no text that could be a secret."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("wb") as file:
        while (at := file.tell()) < size:
            told = host.run(_PIECE, source, str(at + 1), str(_PIECE_BYTES), privileged=True, timeout_s=600)
            piece = base64.b64decode(told.stdout)
            if told.exit_code or not piece:
                raise UserError(
                    f"cannot read {source} on {host.name} ({told.trouble})", "check the file and its rights"
                )
            file.write(piece)


def _keep(host: Host, source: str, place: Path, masker: Masker, inside: str) -> bool:
    """Copy a small file; one that a secret was taken out of is no longer the file."""
    if fault_of(inside):
        return False
    raw = host.read(source, privileged=True)
    if raw is None:
        return False
    content = masker.content(raw, inside)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
    return content == raw


def _lock(host: Host, path: str) -> LockFile | None:
    raw = host.read(f"{path}/{LOCK_NAME}", privileged=True)
    try:
        return LockFile.model_validate_json(raw) if raw else None
    except ValueError:
        return None


def _locked(lock: LockFile | None, sizes: dict[str, int]) -> tuple[dict[str, str], dict[str, str]]:
    """Hashes and addresses by the lock, where sizes are still the same."""
    same = [each for each in (lock.files if lock else ()) if sizes.get(each.path) == each.size_bytes]
    return {each.path: each.sha256 for each in same}, {each.path: each.url for each in same}


def _hashed(host: Host, path: str, names: list[str]) -> dict[str, str]:
    if not names:
        return {}
    told = host.run(_HASH, path, *names, privileged=True, timeout_s=HASHING_S)
    if told.exit_code:
        raise UserError(f"cannot hash the weights in {path} on {host.name} ({told.trouble})", "check their rights")
    pairs = (line.split("  ", 1) for line in told.stdout.splitlines())
    return {name: digest.lstrip("\\") for digest, name in pairs}


def _hub_url(weights: Weights, name: str) -> str | None:
    return f"{_HUB}/{weights.hub}/resolve/{weights.revision}/{name}" if weights.hub else None


def _source(
    weights: Weights, lock: LockFile | None, files: list[WeightFile]
) -> tuple[Literal["hub", "urls", "unknown"], str | None, str | None]:
    if weights.hub:
        return "hub", weights.hub, weights.revision
    if lock and lock.source.kind == "hub" and lock.source.revision:
        return "hub", lock.source.name, lock.source.revision
    return ("urls" if any(each.url for each in files) else "unknown"), None, None


def read_config(folder: Path) -> dict[str, object]:
    """``config.json`` of captured weights; empty where there is none."""
    try:
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
