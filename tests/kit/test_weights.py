"""Weights are known by hash, and come into a kit only when asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddtree.deploy.local_host import LocalHost
from ddtree.deploy.sections import Drafter
from ddtree.fetch.lock_file import LockedFile, LockedSource, LockFile, write_lock
from ddtree.kit.bag import digest_of
from ddtree.kit.mask import Masker
from ddtree.kit.weights import capture_weights

HERE = LocalHost("none")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text('{"eos_token": "<|end|>", "block_size": 16}')
    (folder / "README.md").write_text("# A card\nHF_TOKEN=plain-word-secret was used\n")
    (folder / "model.safetensors").write_bytes(os.urandom(300_000))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("include", [False, True])
def test_small_files_and_hashes(weights: Path, tmp_path: Path, include: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree.kit.weights._PIECE_BYTES", 70_000)
    masker = Masker()
    place = tmp_path / "kit"
    found = capture_weights(HERE, Drafter(path=str(weights)), place, masker, "drafter/", include=include)
    files = {each.path: each for each in found.files}
    assert {name: each.sha256 for name, each in files.items()} == {p.name: digest_of(p) for p in weights.iterdir()}
    assert files["config.json"].in_kit and not files["README.md"].in_kit, "a masked file is no longer the file"
    assert files["model.safetensors"].in_kit == files["tokenizer.json"].in_kit == include
    assert (place / "model.safetensors").exists() == include
    if include:
        assert digest_of(place / "model.safetensors") == files["model.safetensors"].sha256
    assert "plain-word-secret" not in (place / "README.md").read_text() and masker.masked[0].file == "drafter/README.md"
    assert found.source == "unknown"


def test_a_fetch_lock_gives_hashes_and_sources(weights: Path, tmp_path: Path) -> None:
    """Those of files whose size is still the same; hundreds of gigabytes are not read again."""
    large = weights / "model.safetensors"
    locked = [
        LockedFile(path=large.name, size_bytes=300_000, sha256="ab" * 32, url="https://example.org/model.safetensors"),
        LockedFile(path="config.json", size_bytes=1, sha256="cd" * 32, url="https://example.org/config.json"),
    ]
    source = LockedSource(kind="hub", name="owner/name", revision="0" * 40)
    write_lock(weights, LockFile(tool="test", fetched_unix_s=0, source=source, files=tuple(locked)))
    found = capture_weights(HERE, Drafter(path=str(weights)), tmp_path / "kit", Masker(), "drafter/")
    files = {each.path: each for each in found.files}
    assert files[large.name].sha256 == "ab" * 32 and files[large.name].url == "https://example.org/model.safetensors"
    assert files["config.json"].sha256 == digest_of(weights / "config.json")
    assert (found.source, found.repo, found.revision) == ("hub", "owner/name", "0" * 40)
    assert "1 files are those of" in found.notes[0]
    assert json.loads((tmp_path / "kit/fetch.json").read_text())["repo"] == "owner/name"
