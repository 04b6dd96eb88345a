"""A thousand damages to a kit, its own manifests included: every one is found, and none is imagined."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from ddtree.errors import UserError
from ddtree.kit import bag
from ddtree.kit.check import _experiment_faults, check_folder
from ddtree.kit.compare import compare_kits
from ddtree.kit.guide import guide
from ddtree.kit.open_kit import as_folder, whole_kit
from ddtree.kit.pack import pack
from ddtree.kit.record import KitRecord, read_record
from ddtree.kit.sign_kit import sign_kit

from .small_kit import make_small_kit
from .test_signature import make_key

DAMAGES = 1000
PATCH = {
    "path": "../../../../etc/cron.d/evil",
    "package": "p",
    "change": "added",
    "base_sha256": None,
    "sealed_sha256": "0" * 64,
}
WEIGHT = {"path": "a", "size_bytes": 1, "sha256": "0" * 64}


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    bit = rng.randrange(len(raw) * 8)
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


def test_a_thousand_damages_are_found(tmp_path: Path) -> None:
    """Each on its own; afterwards the kit is put back, and is whole again."""
    kit = make_small_kit(tmp_path / "small-kit")
    sign_kit(kit, make_key(tmp_path / "key"))
    names = [path.relative_to(kit) for path in files_of(kit)]
    assert check_folder(kit).is_whole
    rng = random.Random(20)
    kinds = {"flip": 0, "delete": 0, "add": 0, "rename": 0, "truncate": 0}
    for number in range(DAMAGES):
        kind = rng.choice(list(kinds))
        name = rng.choice([n for n in names if kind not in ("flip", "truncate") or (kit / n).stat().st_size])
        path = kit / name
        before = path.read_bytes()
        other = None
        if kind == "flip":
            flip(path, rng)
        elif kind == "delete":
            path.unlink()
        elif kind == "truncate":
            path.write_bytes(before[: rng.randrange(len(before))])
        else:
            other = path.with_name(rng.choice([f"{path.name}x", f"x{path.name}", path.name.swapcase(), "new"]))
            if other.exists():
                continue
            if kind == "rename":
                path.rename(other)
            else:
                other.write_bytes(rng.choice([b"", before, b"more"]))
        kinds[kind] += 1
        found = check_folder(kit)
        assert found.faults, (number, kind, name, other)
        words = {"delete": "missing", "add": "extra"}.get(kind)
        if words and name.parts[0] == "data":
            assert any(fault.startswith(words) for fault in found.faults), (kind, name, found.faults)
        if kind == "rename" and name.parts[0] == "data" and before:
            assert any(f.startswith("renamed") and path.name in f and other.name in f for f in found.faults), found
        if other:
            other.unlink(missing_ok=True)
        path.write_bytes(before)
    assert min(kinds.values()) > DAMAGES / 10, kinds
    assert check_folder(kit).faults == []


def test_the_fast_mode_sees_all_but_content_of_large_files(tmp_path: Path, small: Path) -> None:
    kit = Path(shutil.copytree(small, tmp_path / "small-kit"))
    log = kit / "data" / "logs" / "service.log"
    log.write_bytes(log.read_bytes()[:-1])
    assert any("altered" in fault for fault in check_folder(kit, is_fast=True).faults)
    assert check_folder(small, is_fast=True).is_whole


def test_fast_is_honest_about_what_it_did_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree.kit.check.FAST_BYTES", 1000)
    kit = make_small_kit(tmp_path / "small-kit")
    whole = check_folder(kit, is_fast=True)
    assert whole.is_whole and "fast mode" in whole.unchecked[0]
    flip(kit / "data" / "logs" / "service.log", random.Random(1))
    assert check_folder(kit, is_fast=True).is_whole and not check_folder(kit).is_whole
    (kit / "data" / "logs" / "service.log").write_bytes(b"cut")
    assert not check_folder(kit, is_fast=True).is_whole


@pytest.mark.parametrize("ending", [".tar.zst", ".zip"])
def test_flips_in_archives(tmp_path: Path, small: Path, ending: str) -> None:
    """What changes the content is found; a flip that is not found changed nothing that comes out."""
    archive = pack(small, tmp_path / f"small-kit{ending}")
    raw = archive.read_bytes()
    rng = random.Random(7)
    right = {path.relative_to(small): path.read_bytes() for path in files_of(small)}
    found = 0
    for _ in range(120):
        broken = bytearray(raw)
        bit = rng.randrange(len(raw) * 8)
        broken[bit // 8] ^= 1 << bit % 8
        archive.write_bytes(broken)
        try:
            with as_folder(archive) as folder:
                if check_folder(folder).is_whole:
                    assert {path.relative_to(folder): path.read_bytes() for path in files_of(folder)} == right
                    continue
        except UserError:
            pass
        found += 1
    assert found > 80


@pytest.mark.parametrize("what", ["link", "folder", "look-alike"])
def test_what_is_no_plain_file_is_extra(kit_copy: Path, what: str) -> None:
    place = kit_copy / "data" / "logs"
    if what == "link":
        (place / "more.log").symlink_to("service.log")
    elif what == "folder":
        (place / "more").mkdir()
    else:
        (place / "sеrvice.log").write_text("the second letter is Cyrillic")
    assert any(fault.startswith("extra") for fault in check_folder(kit_copy).faults)


def test_a_form_of_another_version_is_named(tmp_path: Path) -> None:
    kit = make_small_kit(tmp_path / "small-kit")
    record = kit / "data" / "kit.json"
    record.write_text(record.read_text().replace('"schema_version": "1.0"', '"schema_version": "9.0"'))
    reseal(kit)
    assert any("form: data/kit.json" in fault for fault in check_folder(kit).faults)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("patches/patches.json", {"package": "p", "version": "1", "base": "RECORD", "files": [PATCH]}),
        ("model/fetch.json", {"source": "urls", "files": [WEIGHT | {"path": "../../../etc/cron.d/evil"}]}),
        ("model/fetch.json", {"source": "urls", "files": [WEIGHT | {"path": "/etc/cron.d/evil"}]}),
        ("model/fetch.json", {"source": "urls", "files": [WEIGHT | {"url": "file:///etc/shadow"}]}),
    ],
)
def test_a_record_that_leads_out_of_its_folder_is_refused(tmp_path: Path, file: str, content: object) -> None:
    """Sealed by whoever made it, so that every hash is right: `restore` would write where the path leads, as root."""
    kit = make_small_kit(tmp_path / "small-kit")
    (kit / "data" / file).parent.mkdir(exist_ok=True)
    (kit / "data" / file).write_text(json.dumps(content))
    reseal(kit)
    assert [fault for fault in check_folder(kit).faults if fault.startswith(f"form: data/{file}")]
    with pytest.raises(UserError, match="does not pass its check"), whole_kit(kit):
        pass


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("verify.json", b"[" * 100_000),
        ("verify.json", b'{"verdict": ' + b"9" * 10_000 + b"}"),
        ("kit.json", b"[" * 100_000),
        ("kit.json", b'{"\xff": 1}'),
        ("deployment.toml", b"\xff"),
        ("deployment.toml", b"a = " + b"[" * 100_000),
    ],
)
def test_records_that_nobody_can_read_are_faults(tmp_path: Path, file: str, content: bytes) -> None:
    kit = make_small_kit(tmp_path / "small-kit")
    (kit / "data" / file).write_bytes(content)
    reseal(kit)
    assert [fault for fault in check_folder(kit).faults if fault.startswith("form: ")]


def test_a_manifest_of_an_experiment_with_impossible_names(tmp_path: Path) -> None:
    lines = f"{'0' * 64}  a\0b\n{'0' * 64}  {'long' * 2000}\n{'0' * 64}  ../../../../../../etc/passwd\n"
    folder = tmp_path / "payload" / "experiments" / "one"
    folder.mkdir(parents=True)
    (folder / bag.MANIFEST).write_text(lines)
    assert [fault[-17:] for fault in _experiment_faults(folder)] == ["is not in the kit"] * 3


def test_names_in_a_kit_do_not_command_a_terminal(tmp_path: Path) -> None:
    kit = make_small_kit(tmp_path / "small-kit")
    path = kit / "data" / "kit.json"
    record = json.loads(path.read_text())
    evil = "x\x1b[2J\x1b]0;title\x07"
    record["places"][0]["name"] = record["name"] = evil
    path.write_text(json.dumps(record))
    hostile = read_record(KitRecord, path)
    other = make_small_kit(tmp_path / "other")
    whole = read_record(KitRecord, other / "data" / "kit.json")
    differences = compare_kits((other / "data", whole), (kit / "data", hostile))
    for told in (guide(hostile, kit / "data"), "\n".join(line for lines in differences.values() for line in lines)):
        assert "x\\x1b[2J" in told and not {"\x1b", "\x07"} & set(told)


def reseal(kit: Path) -> None:
    digests = {path.relative_to(kit).as_posix(): bag.digest_of(path) for path in files_of(kit / "data")}
    (kit / bag.MANIFEST).write_text(bag.told_manifest(digests))
    files = files_of(kit / "data")
    oxum = f"{sum(path.stat().st_size for path in files)}.{len(files)}"
    bag.write_info(kit, [(name, oxum if name == "Payload-Oxum" else value) for name, value in bag.read_info(kit)])
    bag.seal_tags(kit)


@pytest.fixture
def kit_copy(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "copy"))
