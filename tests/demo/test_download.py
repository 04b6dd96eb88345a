"""Downloads against a real server that breaks connections, forgets ranges and serves the wrong bytes."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from file_server import FileServer

from ddtree.demo import download as download_module
from ddtree.demo.cache import shutil as cache_shutil
from ddtree.demo.download import Connection, PinnedFile, Unreachable, download
from ddtree.demo.progress import silent
from ddtree.errors import UserError

CONTENT = random.Random(7).randbytes(2_000_000)
WANTED = PinnedFile("file.bin", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "_PAUSE_S", 0.0)


def fetch(server: FileServer, folder: Path) -> Path:
    return download(WANTED, server.address + "/file.bin", folder, Connection(), silent)


def test_a_whole_file_comes_with_progress(server: FileServer, tmp_path: Path) -> None:
    server.files["/file.bin"] = CONTENT
    seen: list[float] = []
    url = server.address + "/file.bin"
    path = download(WANTED, url, tmp_path, Connection(), lambda stage, fraction: seen.append(fraction))
    assert path.read_bytes() == CONTENT
    assert sorted(seen) == seen and seen[-1] == 1.0
    assert os.listdir(tmp_path) == ["file.bin"]


def test_broken_connections_are_continued(server: FileServer, tmp_path: Path) -> None:
    server.files["/file.bin"] = CONTENT
    server.cut_after = 700_000
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert server.ranges_seen == [None, "bytes=700000-", "bytes=1400000-"]


def test_a_later_run_continues(server: FileServer, tmp_path: Path) -> None:
    server.files["/file.bin"] = CONTENT
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1_234_567])
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert server.ranges_seen == ["bytes=1234567-"]


def test_a_server_without_ranges_starts_again(server: FileServer, tmp_path: Path) -> None:
    server.files["/file.bin"] = CONTENT
    server.ranges = False
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:500])
    assert fetch(server, tmp_path).read_bytes() == CONTENT


def test_a_dead_connection_ends_in_one_line_and_keeps_what_came(server: FileServer, tmp_path: Path) -> None:
    server.files["/file.bin"] = CONTENT
    server.ranges = False
    server.cut_after = 900_000  # each try starts again and breaks at the same place: no progress
    with pytest.raises(UserError, match=r"broke off at 1 of 2 MB .* continues from there"):
        fetch(server, tmp_path)
    assert (tmp_path / "file.bin.part").stat().st_size == 900_000
    assert not (tmp_path / "file.bin").exists()


def test_nothing_at_all_is_told_apart(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="404"):
        fetch(server, tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("proxy", ["nonsense://x", "http://[::1"])
def test_a_proxy_that_cannot_be_used(server: FileServer, tmp_path: Path, proxy: str) -> None:
    with pytest.raises(Unreachable, match="the proxy cannot be used"):
        download(WANTED, server.address + "/file.bin", tmp_path, Connection(proxy=proxy), silent)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("wrong", [CONTENT[:-1] + b"?", CONTENT + b"more"], ids=["other byte", "too long"])
def test_wrong_content_is_deleted(server: FileServer, tmp_path: Path, wrong: bytes) -> None:
    server.files["/file.bin"] = wrong
    with pytest.raises(UserError, match="not the expected file"):
        fetch(server, tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_wrong_beginning_from_an_earlier_run_is_deleted(server: FileServer, tmp_path: Path) -> None:
    server.files["/file.bin"] = CONTENT
    (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
    with pytest.raises(UserError, match="run the same command again"):
        fetch(server, tmp_path)
    assert fetch(server, tmp_path).read_bytes() == CONTENT


def test_no_disk_space_is_told_before_anything_is_written(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/file.bin"] = CONTENT
    usage = cache_shutil.disk_usage(tmp_path)
    monkeypatch.setattr(cache_shutil, "disk_usage", lambda folder: usage._replace(free=1_000_000))
    with pytest.raises(UserError, match=r"not enough disk space in .*: 18 MB needed, 1 MB free"):
        fetch(server, tmp_path)
    assert os.listdir(tmp_path) == []
    assert server.ranges_seen == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_leaves_nothing(server: FileServer, tmp_path: Path) -> None:
    server.files["/file.bin"] = CONTENT
    (tmp_path / "file.bin.part").symlink_to("/dev/full")
    with pytest.raises(UserError, match="is full") as raised:
        fetch(server, tmp_path)
    assert isinstance(raised.value.__cause__, OSError) and raised.value.__cause__.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def test_a_file_address_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "an index with blanks"
    source.mkdir()
    (source / "file.bin").write_bytes(CONTENT)
    (tmp_path / "to").mkdir()
    url = (source / "file.bin").as_uri()
    assert download(WANTED, url, tmp_path / "to", Connection(), silent).read_bytes() == CONTENT


def test_a_killed_run_is_continued(server: FileServer, tmp_path: Path) -> None:
    """A process is killed in mid-download; the next one asks only for the rest."""
    big = random.Random(8).randbytes(40_000_000)
    server.files["/big.bin"] = big
    code = f"""if True:
        import time
        from pathlib import Path
        from ddtree.demo.download import *
        wanted = PinnedFile("big.bin", {len(big)}, "{hashlib.sha256(big).hexdigest()}")
        def slowly(stage, fraction):
            time.sleep(0.01)
        download(wanted, "{server.address}/big.bin", Path({str(tmp_path)!r}), Connection(), slowly)
    """
    victim = subprocess.Popen([sys.executable, "-c", code])
    part = tmp_path / "big.bin.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > 1_000_000):
        assert time.monotonic() < deadline and victim.poll() is None
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert 0 < part.stat().st_size < len(big)
    subprocess.run([sys.executable, "-c", code.replace("0.01", "0")], check=True)
    assert (tmp_path / "big.bin").read_bytes() == big
    assert len(server.ranges_seen) == 2 and server.ranges_seen[1] not in (None, "bytes=0-")
