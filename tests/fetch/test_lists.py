"""Lists of addresses, by our own download and by aria2c, against a server that breaks connections and lies."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from broken_web import Web

from ddtree.cli.main import run
from ddtree.errors import UserError
from ddtree.fetch import LOCK_NAME, Fetch, check_folder, read_list, read_lock
from ddtree.fetch.wanted import STAGING

CONTENT = {
    "model.safetensors": random.Random(1).randbytes(3_000_000),
    "deep/er/shard.safetensors": random.Random(2).randbytes(900_000),
    "config.json": b'{"a": 1}',
    "empty.txt": b"",
}
VIAS = [
    "plain",
    pytest.param("aria2c", marks=pytest.mark.skipif(shutil.which("aria2c") is None, reason="aria2c is not installed")),
]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def listed(web: Web, tmp_path: Path) -> Path:
    for name, content in CONTENT.items():
        web.files[f"/files/{name}"] = content
    lines = ["# a model", *(f"{web.address}/files/{n} {sha256(c)} {n}" for n, c in CONTENT.items())]
    file = tmp_path / "list.txt"
    file.write_text("\n".join(lines) + "\n")
    return file


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def placed(folder: Path) -> set[str]:
    """Files outside of the staging folder."""
    return {name for name in files_of(folder) if not name.startswith(STAGING)}


@pytest.mark.parametrize("via", VIAS)
def test_a_list_is_fetched_and_locked(listed, web, tmp_path, via):
    folder, told = tmp_path / "model", []
    lock = Fetch(read_list(listed), folder, via=via, tell=told.append).run()
    assert files_of(folder) == {*CONTENT, LOCK_NAME}
    assert all((folder / name).read_bytes() == content for name, content in CONTENT.items())
    assert read_lock(folder) == lock and lock.total_bytes == sum(map(len, CONTENT.values()))
    assert {file.path: file.sha256 for file in lock.files} == {n: sha256(c) for n, c in CONTENT.items()}
    assert lock.source.kind == "urls" and lock.source.list_sha256 == sha256(listed.read_bytes())
    assert told[-1].done_bytes == told[-1].total_bytes == lock.total_bytes
    assert check_folder(folder).is_whole
    before = web.sent_bytes
    Fetch(read_list(listed), folder, via=via).run()
    assert web.sent_bytes == before, "what is there and right is not fetched again"


@pytest.mark.parametrize("via", VIAS)
def test_broken_connections_are_continued(listed, web, tmp_path, via):
    web.cut_after, web.cuts = 400_000, 6
    Fetch(read_list(listed), tmp_path / "model", via=via).run()
    assert check_folder(tmp_path / "model").is_whole
    assert web.cuts == 0
    assert web.sent_bytes < 1.7 * sum(map(len, CONTENT.values())), "what had come was not asked for again"


@pytest.mark.parametrize("via", VIAS)
def test_a_wrong_byte_never_gets_into_place(listed, web, tmp_path, via):
    right = CONTENT["model.safetensors"]
    web.files["/files/model.safetensors"] = right[:-1] + bytes([right[-1] ^ 1])
    folder = tmp_path / "model"
    with pytest.raises(UserError, match=r"model\.safetensors came with other content .* and was deleted"):
        Fetch(read_list(listed), folder, via=via).run()
    assert "model.safetensors" not in placed(folder) and LOCK_NAME not in placed(folder)
    web.files["/files/model.safetensors"] = right
    Fetch(read_list(listed), folder, via=via).run()
    assert check_folder(folder).is_whole


@pytest.mark.parametrize("via", VIAS)
def test_a_shorter_file_never_gets_into_place(listed, web, tmp_path, via):
    """The server tells a smaller size and sends just that: no connection breaks, only the hash can tell."""
    web.files["/files/model.safetensors"] = CONTENT["model.safetensors"][:-1000]
    folder = tmp_path / "model"
    with pytest.raises(UserError, match="other content"):
        Fetch(read_list(listed), folder, via=via).run()
    assert "model.safetensors" not in placed(folder) and LOCK_NAME not in placed(folder)


@pytest.mark.parametrize("via", VIAS)
def test_a_file_that_is_not_there(listed, web, tmp_path, via):
    del web.files["/files/config.json"]
    with pytest.raises(UserError, match=r"404|gave up|did not come"):
        Fetch(read_list(listed), tmp_path / "model", via=via).run()
    assert LOCK_NAME not in placed(tmp_path / "model")


def test_a_folder_between_two_versions_has_no_lock(listed, web, tmp_path):
    """Some files are of the new list already, so the old lock must not tell of the folder any more."""
    folder = tmp_path / "model"
    Fetch(read_list(listed), folder).run()
    for name in ("config.json", "model.safetensors"):
        web.files[f"/files/{name}"] = b"new " + CONTENT[name]
        listed.write_text(listed.read_text().replace(sha256(CONTENT[name]), sha256(b"new " + CONTENT[name])))
    right = web.files["/files/config.json"]
    web.files["/files/config.json"] = right[::-1]
    with pytest.raises(UserError, match="other content"):
        Fetch(read_list(listed), folder, jobs=1, via="plain").run()
    assert (folder / "model.safetensors").read_bytes().startswith(b"new ")
    assert (folder / "config.json").read_bytes() == CONTENT["config.json"]
    assert LOCK_NAME not in placed(folder)
    web.files["/files/config.json"] = right
    Fetch(read_list(listed), folder).run()
    assert check_folder(folder).is_whole


def test_a_killed_run_is_continued(listed, web, tmp_path):
    """A process is killed in mid-transfer; the next one asks only for the rest."""
    folder = tmp_path / "model"
    big = random.Random(8).randbytes(30_000_000)
    web.files["/files/big.bin"] = big
    with listed.open("a") as file:
        file.write(f"{web.address}/files/big.bin {sha256(big)}\n")
    code = f"""if True:
        import time
        from pathlib import Path
        from ddtree.demo import download
        from ddtree.fetch import Fetch, read_list
        download.silent = lambda stage, fraction: time.sleep(0.01)
        import ddtree.fetch.plain as plain
        plain.silent = download.silent
        Fetch(read_list(Path({str(listed)!r})), Path({str(folder)!r}), via="plain").run()
    """
    victim = subprocess.Popen([sys.executable, "-c", code])
    part = folder / STAGING / "files" / "big.bin.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > 1_000_000):
        assert victim.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    web.asked.clear()
    Fetch(read_list(listed), folder, via="plain").run()
    assert check_folder(folder).is_whole
    ranges = [asked for _, path, asked in web.asked if path.endswith("big.bin") and asked != "bytes=0-0"]
    assert len(ranges) == 1 and ranges[0] not in (None, "bytes=0-")


def test_two_fetches_into_one_folder(listed, tmp_path):
    import fcntl

    staging = tmp_path / "model" / STAGING
    staging.mkdir(parents=True)
    with (staging / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another ddtree fetch fills"):
            Fetch(read_list(listed), tmp_path / "model").run()


def test_patterns_choose(listed, tmp_path):
    lock = Fetch(
        read_list(listed), tmp_path / "model", via="plain", include=["*.safetensors", "*.json"], exclude=["deep/*"]
    ).run()
    assert [file.path for file in lock.files] == ["config.json", "model.safetensors"]
    assert check_folder(tmp_path / "model").is_whole


def test_no_room_is_told_before_anything_comes(listed, tmp_path, web, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("ddtree.fetch.run.shutil.disk_usage", lambda folder: usage._replace(free=1_000_000))
    with pytest.raises(UserError, match=r"has 0.0 GB free, 0.1 GB are needed: free some, or choose another --to"):
        Fetch(read_list(listed), tmp_path / "model", via="plain").run()
    assert web.sent_bytes < 100


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("http://x/a", "no SHA-256"),
        ("http://x/a 1234", "no SHA-256"),
        (f"ftp://x/a {'0' * 64}", "no http or https address"),
        (f"http://me:secret@x/a {'0' * 64}", "holds a password"),
        (f"http://x/a {'0' * 64} ../a", "cannot be in a folder"),
        (f"http://x/a {'0' * 64} /etc/passwd", "cannot be in a folder"),
        (f"http://x/a {'0' * 64} .ddtree-fetch/lock", "cannot be in a folder"),
        (f"http://x/%2e%2e {'0' * 64}", "cannot be in a folder"),
        (f"http://x/ {'0' * 64}", "cannot be in a folder"),
        (f"http://x/a {'0' * 64} a b", "4 words"),
        (f"http://x/a {'0' * 64}\nhttp://y/a {'1' * 64}", "names a twice"),
        (f"http://x/a {'0' * 64}\nhttp://y/b {'1' * 64} a/b", "names a as a file and as a folder"),
        (f"http://x/a {'0' * 64} {'n' * 300}", "cannot be in a folder"),
        (f"http://x/a {'0' * 64} ddtree-fetch.lock.json.unfinished", "cannot be in a folder"),
        ("# nothing", "names no file"),
    ],
)
def test_a_list_that_cannot_be_taken(tmp_path, line, told):
    file = tmp_path / "list.txt"
    file.write_text(line + "\n")
    with pytest.raises(UserError, match=told) as raised:
        read_list(file)
    assert "secret" not in str(raised.value) and raised.value.remedy


def test_files_named_as_our_own(web, tmp_path):
    """A file of the source must not become the journal or the lock of the fetch."""
    names = {"lock": b"1", "verified.json": b'{"x": 1}', "verified.unfinished": b"3"}
    lines = []
    for name, content in names.items():
        web.files["/" + name] = content
        lines.append(f"{web.address}/{name} {sha256(content)}")
    (tmp_path / "list.txt").write_text("\n".join(lines))
    Fetch(read_list(tmp_path / "list.txt"), tmp_path / "model", via="plain").run()
    assert {name: (tmp_path / "model" / name).read_bytes() for name in names} == names


def test_a_lock_that_leads_out_is_refused(tmp_path):
    file = {"path": "../outside", "size_bytes": 0, "sha256": "0" * 64, "url": "http://x/a"}
    source = {"kind": "urls", "name": "x"}
    lock = {"format": 1, "tool": "x", "fetched_unix_s": 0, "source": source, "files": [file]}
    (tmp_path / LOCK_NAME).write_text(json.dumps(lock))
    with pytest.raises(UserError, match=r"is damaged.*cannot be in a folder"):
        check_folder(tmp_path)


def test_check_names_every_difference(listed, tmp_path):
    folder = tmp_path / "model"
    Fetch(read_list(listed), folder, via="plain").run()
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[5] ^= 1
    weights.write_bytes(content)
    (folder / "config.json").unlink()
    (folder / "empty.txt").write_text("x")
    (folder / "more.txt").touch()
    result = check_folder(folder)
    assert result.faults.keys() == {"model.safetensors", "config.json", "empty.txt"} and result.others == ("more.txt",)
    assert "SHA-256" in result.faults["model.safetensors"] and "missing" in result.faults["config.json"]
    Fetch(read_list(listed), folder, via="plain").run()
    assert check_folder(folder).is_whole, "the same command repairs it"


def test_a_damaged_lock_is_told(tmp_path):
    with pytest.raises(UserError, match="name a folder that ddtree fetch has filled"):
        check_folder(tmp_path)
    (tmp_path / LOCK_NAME).write_text('{"format": 1}')
    with pytest.raises(UserError, match="is damaged"):
        check_folder(tmp_path)


def test_the_command(listed, tmp_path, capsys):
    folder = tmp_path / "model"
    assert run(["fetch", "--urls", str(listed), "--to", str(folder), "--json"]) == 0
    told = capsys.readouterr()
    assert {file["path"] for file in json.loads(told.out)["files"]} == set(CONTENT)
    assert "fetching" in told.err
    assert run(["fetch", "--check", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("all 4 files are as in the lock")
    (folder / "config.json").write_text("{}")
    assert run(["fetch", "--check", str(folder)]) == 1
    assert "config.json has 2 bytes" in capsys.readouterr().out
    for wrong in ([], ["--urls", str(listed)], ["owner/model", "--to", "x"], ["--check", "x", "--to", "y"]):
        assert run(["fetch", *wrong]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
