"""Archives: the same bytes every time, and nothing hostile comes out of one."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from ddtree.errors import UserError
from ddtree.kit.check import check_folder
from ddtree.kit.open_kit import as_folder
from ddtree.kit.pack import pack
from ddtree.kit.unpack import unpack

from .conftest import ddtree


@pytest.mark.parametrize("ending", [".tar.zst", ".zip"])
def test_packing_twice_is_the_same(small: Path, tmp_path: Path, ending: str) -> None:
    first = pack(small, tmp_path / "one" / f"kit{ending}").read_bytes()
    for path in small.rglob("*"):
        os.utime(path, (time.time(), 12345678 + len(path.name)))
    (small / "data" / "verify.json").chmod(0o600)
    assert pack(small, tmp_path / "two" / f"kit{ending}").read_bytes() == first
    unpacked = unpack(tmp_path / "one" / f"kit{ending}", tmp_path / "again")
    assert check_folder(unpacked).is_whole
    assert pack(unpacked, tmp_path / "three" / f"kit{ending}").read_bytes() == first
    with as_folder(tmp_path / "one" / f"kit{ending}") as folder:
        assert check_folder(folder).is_whole


def test_common_tools_read_them(small: Path, tmp_path: Path) -> None:
    pack(small, tmp_path / "kit.tar.zst")
    pack(small, tmp_path / "kit.zip")
    with tarfile.open(
        fileobj=io.BytesIO(zstandard.decompress((tmp_path / "kit.tar.zst").read_bytes(), 1 << 24))
    ) as tar:
        members = tar.getmembers()
        assert {(m.mtime, m.uid, m.gid, m.uname, m.mode) for m in members} == {(315532800, 0, 0, "", 0o644)}
        assert [m.name for m in members] == sorted(m.name for m in members)
    subprocess.run([sys.executable, "-m", "zipfile", "-t", str(tmp_path / "kit.zip")], check=True, capture_output=True)


def test_a_damaged_kit_is_not_packed(small: Path, tmp_path: Path) -> None:
    import shutil

    kit = Path(shutil.copytree(small, tmp_path / "kit"))
    (kit / "data" / "extra").write_text("x")
    done = ddtree("kit", "pack", kit, "--out", tmp_path / "kit.zip", check=False)
    assert done.returncode == 2 and "does not pass its check: extra" in done.stderr
    assert not list(tmp_path.glob("*.zip"))


Fill = Callable[[tarfile.TarFile], None]


def plain(name: str, content: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, io.BytesIO]:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    return member, io.BytesIO(content)


def link(name: str, target: str, kind: bytes) -> Fill:
    def fill(tar: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        tar.addfile(member)
        tar.addfile(*plain(f"{name}/written-through"))

    return fill


def names(*each: str) -> Fill:
    def fill(tar: tarfile.TarFile) -> None:
        for name in each:
            tar.addfile(*plain(name))

    return fill


def sparse(tar: tarfile.TarFile) -> None:
    member = tarfile.TarInfo("kit/holes")
    member.type, member.size = tarfile.GNUTYPE_SPARSE, 1 << 40
    tar.addfile(member)


def pax_sparse(tar: tarfile.TarFile) -> None:
    member, content = plain("kit/holes", b"1\n0\n1\n".ljust(512, b"\0") + b"x")
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}
    tar.addfile(member, content)


def bomb(tar: tarfile.TarFile) -> None:
    tar.addfile(*plain("kit/zeros", bytes(200 << 20)))


def device(tar: tarfile.TarFile) -> None:
    member = tarfile.TarInfo("kit/null")
    member.type, member.devmajor, member.devminor = tarfile.CHRTYPE, 1, 3
    tar.addfile(member)


HOSTILE_TARS: dict[str, Fill] = {
    "traversal": names("kit/../../outside"),
    "traversal at once": names("../outside"),
    "absolute": names("/tmp/outside-of-the-kit"),
    "link out": link("kit/data", "/tmp", tarfile.SYMTYPE),
    "relative link out": link("kit/data", "../..", tarfile.SYMTYPE),
    "hard link": link("kit/data", "/etc/passwd", tarfile.LNKTYPE),
    "device": device,
    "holes": sparse,
    "holes by pax": pax_sparse,
    "twice": names("kit/a", "kit/a"),
    "twice but for case": names("kit/data/A", "kit/data/a"),
    "a file and a folder": names("kit/a", "kit/a/b"),
    "a folder and a file": names("kit/a/b", "kit/a"),
    "look-alike": names("kit/data/dаta.json"),
    "full width": names("kit/../ｏutside"),
    "right to left": names("kit/data/\u202efdp.sh"),
    "decomposed": names("kit/data/e\u0301"),
    "backslash": names("kit\\..\\..\\outside"),
    "drive": names("C:/outside"),
    "control character": names("kit/a\nb"),
    "blank at the end": names("kit/data./a"),
    "device name": names("kit/data/CON"),
    "beside the kit": names("kit/a", "other/b"),
    "long name": names("kit/" + "a" * 300),
    "bomb": bomb,
}


@pytest.mark.parametrize("what", HOSTILE_TARS)
def test_hostile_tars_are_refused(tmp_path: Path, what: str) -> None:
    archive = tmp_path / "in" / "kit.tar.zst"
    archive.parent.mkdir()
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        HOSTILE_TARS[what](tar)
    archive.write_bytes(zstandard.compress(raw.getvalue(), 3))
    refused(archive, tmp_path)


def test_a_header_that_asks_for_memory_is_refused(tmp_path: Path) -> None:
    member = tarfile.TarInfo("kit/x")
    member.type, member.size = tarfile.XHDTYPE, 60 << 30
    archive = tmp_path / "in" / "kit.tar.zst"
    archive.parent.mkdir()
    archive.write_bytes(zstandard.compress(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024), 3))
    refused(archive, tmp_path)


Pack = Callable[[zipfile.ZipFile], None]


def zip_names(*each: str) -> Pack:
    return lambda archive: [archive.writestr(zipfile.ZipInfo(name), b"x") for name in each] and None


def zip_link(archive: zipfile.ZipFile) -> None:
    member = zipfile.ZipInfo("kit/data")
    member.create_system, member.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    archive.writestr(member, "/tmp")
    archive.writestr("kit/data/outside", b"x")


HOSTILE_ZIPS: dict[str, Pack] = {
    "traversal": zip_names("kit/../../outside"),
    "absolute": zip_names("/tmp/outside-of-the-kit"),
    "backslash": zip_names("kit\\..\\outside"),
    "link": zip_link,
    "twice": zip_names("kit/a", "kit/a"),
    "twice but for case": zip_names("kit/a", "kit/A"),
    "look-alike": zip_names("kit/dаta.json"),
    "zero": zip_names("kit/aZEROb"),
    "bomb": lambda archive: archive.writestr("kit/zeros", bytes(200 << 20), zipfile.ZIP_DEFLATED, 9),
    "another method": lambda archive: archive.writestr("kit/a", b"x" * 99, zipfile.ZIP_LZMA),
}


@pytest.mark.parametrize("what", HOSTILE_ZIPS)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_hostile_zips_are_refused(tmp_path: Path, what: str) -> None:
    archive = tmp_path / "in" / "kit.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as into:
        HOSTILE_ZIPS[what](into)
    archive.write_bytes(archive.read_bytes().replace(b"ZERO", b"\0\0\0\0"))  # which zipfile itself does not write
    refused(archive, tmp_path)


def test_a_zip_that_lies_about_sizes_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "in" / "kit.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as into:
        into.writestr("kit/a", bytes(100_000))
    raw = archive.read_bytes().replace((100_000).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    archive.write_bytes(raw)
    refused(archive, tmp_path)


@pytest.mark.parametrize("content", [b"", b"nonsense", zstandard.compress(b""), zstandard.compress(b"nonsense" * 99)])
@pytest.mark.parametrize("ending", [".tar.zst", ".zip"])
def test_nonsense_is_refused(tmp_path: Path, content: bytes, ending: str) -> None:
    archive = tmp_path / "in" / f"kit{ending}"
    archive.parent.mkdir()
    archive.write_bytes(content)
    refused(archive, tmp_path)


def refused(archive: Path, folder: Path) -> None:
    """In one line; and neither in the kit's place nor around it is anything new."""
    outside = Path("/tmp/outside-of-the-kit")
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError) as caught:
        unpack(archive, folder / "in" / "out" / "kit")
    assert caught.value.remedy and "\n" not in str(caught.value)
    with pytest.raises(UserError), as_folder(archive):
        pass
    after = [path for path in sorted(folder.rglob("*")) if path != folder / "in" / "out"]
    assert after == before and not outside.exists()
