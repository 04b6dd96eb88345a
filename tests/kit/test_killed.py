"""Killed at any instant: no half kit passes its check, and what was broken off is simply done again."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddtree.errors import UserError
from ddtree.kit.check import check_folder
from ddtree.kit.create import CreateOptions
from ddtree.kit.create_archive import create_archive
from ddtree.kit.experiments import copy_tree
from ddtree.kit.mask import Masker
from ddtree.kit.open_kit import as_folder
from ddtree.kit.sign_kit import sign_kit

from .small_kit import make_small_kit
from .test_signature import make_key

TRIES = 50
# The child imports once and forks for each try, so that the kill hits the work and not the imports.
_CREATE = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from kit.small_kit import make_small_kit
import bagit, rocrate.rocrate, ddtree.kit.create, ddtree.kit.crate
make_small_kit(Path(sys.argv[2]).parent / "warm-up")
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        make_small_kit(Path(line.strip()))
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


def test_create_is_all_or_nothing(tmp_path: Path) -> None:
    """Kills spread over the time that one creation takes, and a little more."""
    place = tmp_path / "kit"
    tests = str(Path(__file__).parents[1])
    rng = random.Random(3)
    absent = whole = 0
    with subprocess.Popen(
        [sys.executable, "-c", _CREATE, tests, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as factory:
        assert factory.stdin and factory.stdout

        def begin() -> int:
            assert factory.stdin and factory.stdout
            print(place, file=factory.stdin, flush=True)
            return int(factory.stdout.readline())

        took_s = []
        for _ in range(5):
            shutil.rmtree(place, ignore_errors=True)
            began = time.monotonic()
            begin()
            factory.stdout.readline()
            took_s.append(time.monotonic() - began)
        takes_s = sorted(took_s)[1]
        assert check_folder(place).is_whole
        manifest = (place / "manifest-sha256.txt").read_bytes()
        for _ in range(TRIES):
            shutil.rmtree(place, ignore_errors=True)
            child = begin()
            time.sleep(rng.uniform(0, takes_s * 1.1))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            factory.stdout.readline()
            if place.exists():
                assert check_folder(place).is_whole
                whole += 1
            else:
                absent += 1
            for draft in tmp_path.glob(".kit*"):
                # Whole at the last instant before it gets its name, or not at all.
                assert not check_folder(draft).is_whole or (draft / "manifest-sha256.txt").read_bytes() == manifest
        shutil.rmtree(place, ignore_errors=True)
        begin()
        factory.stdout.readline()
        factory.stdin.close()
    assert check_folder(place).is_whole and not list(tmp_path.glob(".kit*")), "the next one cleans up"
    assert absent > TRIES / 4, (absent, whole)


def test_signing_leaves_the_old_kit_or_the_new_one(tmp_path: Path) -> None:
    kit = make_small_kit(tmp_path / "kit")
    key = make_key(tmp_path / "key")
    code = "import sys; from pathlib import Path; from ddtree.kit.sign_kit import sign_kit; print(flush=True); "
    code += "sign_kit(Path(sys.argv[1]), Path(sys.argv[2]))"
    rng = random.Random(4)
    for _ in range(6):
        with subprocess.Popen([sys.executable, "-c", code, str(kit), str(key)], stdout=subprocess.PIPE) as child:
            assert child.stdout
            child.stdout.readline()
            time.sleep(rng.uniform(0, 0.25))
            child.send_signal(signal.SIGKILL)
        assert check_folder(kit).is_whole
    sign_kit(kit, key)
    assert check_folder(kit).is_whole and len(check_folder(kit).signatures) == 1


def test_an_archive_is_there_as_a_whole_and_its_folder_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken off while it packs, or killed: no kit stays under the name without its ending, and the next one goes."""
    monkeypatch.setattr("ddtree.kit.create_archive.create", lambda options, tell: make_small_kit(options.out))
    options = CreateOptions(out=tmp_path / "kit.zip", sources=())
    with monkeypatch.context() as broken:
        broken.setattr("ddtree.kit.create_archive.pack", lambda folder, out: Path("/nowhere/at/all").read_bytes())
        with pytest.raises(UserError):
            create_archive(options)
    assert not list(tmp_path.iterdir())
    make_small_kit(tmp_path / ".kit.zip.folder.unfinished" / "kit")  # as a kill leaves it
    create_archive(options)
    assert [path.name for path in tmp_path.iterdir()] == ["kit.zip"]
    with as_folder(tmp_path / "kit.zip") as folder:
        assert check_folder(folder).is_whole
    with pytest.raises(UserError, match="is there already"):
        create_archive(options)


def test_what_a_kill_left_half_written_gets_into_no_kit(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    for name in ("run.json", ".0123456789abcdef.unfinished"):
        (results / name).write_text("{}")
    copy_tree(results, tmp_path / "copied", "results", Masker())
    assert [path.name for path in (tmp_path / "copied").iterdir()] == ["run.json"]
