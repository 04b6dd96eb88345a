"""The hub's own library against a hub on this machine: resolved, resumed, verified."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from broken_web import COMMIT, Hub, running

from ddtree.errors import UserError
from ddtree.fetch import LOCK_NAME, check_folder, parse_hub, read_lock

FILES = {
    "config.json": b'{"model_type": "tiny"}',
    "model-00001-of-00002.safetensors": random.Random(3).randbytes(2_500_000),
    "model-00002-of-00002.safetensors": random.Random(4).randbytes(700_000),
    "nested/tokenizer.json": random.Random(5).randbytes(5_000),
}


VIA = {"main": ("--via", "hub"), COMMIT: ("--via", "aria2c") if shutil.which("aria2c") else ()}


@pytest.fixture
def hub():
    with running(Hub(dict(FILES))) as server:
        yield server


def fetch(hub: Hub, folder: Path, *arguments: str, source: str = "owner/model@main"):
    """The command as a process, so that the library reads its settings anew."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(folder.parent / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-m", "ddtree", "fetch", source, "--to", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )


@pytest.mark.parametrize("revision", ["main", COMMIT])
def test_a_repository_is_fetched_at_its_commit(hub, tmp_path, revision):
    folder = tmp_path / "model"
    done = fetch(hub, folder, *VIA[revision], source=f"owner/model@{revision}")
    assert done.returncode == 0, done.stderr
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == {*FILES, LOCK_NAME}
    assert all((folder / name).read_bytes() == content for name, content in FILES.items())
    lock = read_lock(folder)
    assert (lock.source.name, lock.source.asked_revision, lock.source.revision) == ("owner/model", revision, COMMIT)
    assert {file.path: file.sha256 for file in lock.files} == {
        n: hashlib.sha256(c).hexdigest() for n, c in FILES.items()
    }
    assert all(COMMIT in file.url for file in lock.files)
    assert check_folder(folder).is_whole
    assert not any("/resolve/main/" in path for _, path, _ in hub.asked), "files come from the commit"


@pytest.mark.parametrize("via", ["hub", "plain"])
def test_broken_connections_are_continued(hub, tmp_path, via):
    large = random.Random(6).randbytes(24_000_000)  # the library writes in pieces of 10 MB
    hub.tells["large.safetensors"] = large
    hub.spoil("large.safetensors", large)
    hub.cut_after, hub.cuts = 14_000_000, 1
    done = fetch(hub, tmp_path / "model", "--via", via)
    assert done.returncode == 0, done.stderr
    assert hub.cuts == 0 and check_folder(tmp_path / "model").is_whole
    assert any(asked not in (None, "bytes=0-") for _, _, asked in hub.asked)


def test_a_later_run_continues(hub, tmp_path):
    hub.cut_after = 100_000
    hub.cuts = None  # always: each try breaks, some bytes come each time
    first = fetch(hub, tmp_path / "model", "--include", "*.json")
    assert first.returncode == 0
    before = hub.sent_bytes
    hub.cut_after = None
    done = fetch(hub, tmp_path / "model")
    assert done.returncode == 0 and check_folder(tmp_path / "model").is_whole
    assert hub.sent_bytes - before < sum(map(len, FILES.values())), "what was there was not fetched again"


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json"])
def test_a_wrong_byte_never_gets_into_place(hub, tmp_path, name):
    right = FILES[name]
    hub.spoil(name, right[:-1] + bytes([right[-1] ^ 1]))
    folder = tmp_path / "model"
    done = fetch(hub, folder)
    assert done.returncode == 2 and f"{name} came with other content than its hash says" in done.stderr
    assert not (folder / name).exists() and not (folder / LOCK_NAME).exists()
    hub.spoil(name, right)
    assert fetch(hub, folder).returncode == 0 and check_folder(folder).is_whole


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("owner/other@main", "the hub has no repository owner/other for this user"),
        ("owner/model@v9", "owner/model has no revision v9"),
        ("owner/model", "without a revision could be another model tomorrow"),
        ("nonsense@main", "is no repository of the hub"),
    ],
)
def test_what_cannot_be_fetched(hub, tmp_path, source, told):
    done = fetch(hub, tmp_path / "model", source=source)
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_hub_that_names_a_path_outside(hub, tmp_path):
    hub.tells["../../evil"] = b"x"
    done = fetch(hub, tmp_path / "model")
    assert done.returncode == 2 and "cannot be in a folder of weights" in done.stderr


def test_no_hub_at_all(hub, tmp_path):
    hub.shutdown()
    hub.server_close()
    done = fetch(hub, tmp_path / "model")
    assert done.returncode == 2 and "could not serve owner/model@main" in done.stderr, done.stderr


def test_revisions_are_demanded():
    assert parse_hub(f"owner/model@{COMMIT}").revision == COMMIT
    for wrong in ("owner/model@", "owner/model@../x", "a/b/c@main", "owner/model@a b"):
        with pytest.raises(UserError):
            parse_hub(wrong)
