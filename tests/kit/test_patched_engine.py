"""An installed engine with three edited files, one added and one deleted: found, sealed, put back on a fresh one."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from ddtree.deploy.local_host import LocalHost
from ddtree.kit.mask import Masker
from ddtree.kit.patches import capture_patches
from ddtree.kit.record import PatchRecord
from ddtree.kit.restore_engine import EnginePlan, apply_patches, plan_patches
from ddtree.kit.wheel import wheel_of_file

from .engine_package import ADDED, DELETED, EDITED, copy, edit, engine_files, python, site


@pytest.fixture
def sealed(fresh: Path, wheel: Path, tmp_path: Path) -> tuple[PatchRecord, Path, Path]:
    """What was captured of an edited one: the record, its folder, and the edited environment."""
    edited = copy(fresh, tmp_path / "edited")
    edit(edited)
    folder = tmp_path / "kit"
    folder.mkdir()
    record = capture_patches(python(edited), "sglang", folder, Masker(), "", wheel_of_file(wheel))
    return record, folder, edited


def test_an_engine_as_released_has_no_patches(fresh: Path, wheel: Path, tmp_path: Path) -> None:
    for given in (wheel_of_file(wheel), None):
        record = capture_patches(python(fresh), "sglang", tmp_path, Masker(), "", given, may_download=False)
        assert record.files == [] and record.base == ("wheel" if given else "RECORD")


def test_every_change_is_found(sealed: tuple[PatchRecord, Path, Path]) -> None:
    record, folder, _ = sealed
    changes = {each.path: each.change for each in record.files}
    assert changes == {
        **dict.fromkeys(EDITED, "edited"),
        **dict.fromkeys(ADDED, "added"),
        **dict.fromkeys(DELETED, "deleted"),
    }
    assert record.base == "wheel" and record.version == "0.5.17"
    for name, content in (EDITED | ADDED).items():
        assert (folder / "patches/full" / name).read_bytes() == content
    assert (folder / "patches/diffs/sglang.diff").exists()


def test_git_apply_takes_the_diff(sealed: tuple[PatchRecord, Path, Path], fresh: Path, tmp_path: Path) -> None:
    _, folder, edited = sealed
    other = copy(fresh, tmp_path / "other")
    diff = str(folder / "patches/diffs/sglang.diff")
    subprocess.run(["git", "apply", "--check", diff], cwd=site(other), check=True)
    subprocess.run(["git", "apply", diff], cwd=site(other), check=True)
    assert engine_files(other) == engine_files(edited)


def test_patches_are_put_back(sealed: tuple[PatchRecord, Path, Path], fresh: Path, tmp_path: Path) -> None:
    record, folder, edited = sealed
    other = copy(fresh, tmp_path / "other")
    plan = EnginePlan()
    root = plan_patches(python(other), record, plan)
    assert root and not plan.refused and len(plan.to_patch) == 5
    apply_patches(LocalHost("none"), root, folder / "patches", plan.to_patch[:2])  # broken off after two
    plan = EnginePlan()
    plan_patches(python(other), record, plan)
    assert not plan.refused and len(plan.to_patch) == 3 and plan.patched == 2
    apply_patches(LocalHost("none"), root, folder / "patches", plan.to_patch)
    assert engine_files(other) == engine_files(edited)
    plan = EnginePlan()
    plan_patches(python(other), record, plan)
    assert plan.to_patch == [] and plan.patched == 5 and not plan.refused


def test_another_base_is_refused(sealed: tuple[PatchRecord, Path, Path], fresh: Path, tmp_path: Path) -> None:
    record, _, _ = sealed
    other = copy(fresh, tmp_path / "other")
    (site(other) / "sglang/srt/worker.py").write_text("somebody else's\n")
    (site(other) / "sglang/__init__.py").write_text("somebody else's too\n")
    plan = EnginePlan()
    plan_patches(python(other), record, plan)
    assert any("worker.py is neither as released nor as sealed" in told for told in plan.refused)
    assert any("__init__.py was changed there, and not in the kit" in told for told in plan.refused)
    plan = EnginePlan()
    plan_patches(python(other), record.model_copy(update={"version": "0.5.16"}), plan)
    assert plan.refused == ["sglang is 0.5.17, the patches are for 0.5.16"]


def test_without_the_wheel_full_files_remain(fresh: Path, tmp_path: Path) -> None:
    edited = copy(fresh, tmp_path / "edited")
    edit(edited)
    record = capture_patches(python(edited), "sglang", tmp_path, Masker(), "", may_download=False)
    assert len(record.files) == 5 and record.base == "RECORD" and any("no base" in note for note in record.notes)
    assert not (tmp_path / "patches/diffs").exists() and (tmp_path / "patches/full/sglang/srt/graph.py").exists()


def test_a_secret_in_a_patched_file_is_masked_and_the_file_marked(fresh: Path, wheel: Path, tmp_path: Path) -> None:
    edited = copy(fresh, tmp_path / "edited")
    secret = "hf_" + "x7Yq" * 8
    (site(edited) / "sglang/srt/graph.py").write_text(f"TOKEN = '{secret}'\n")
    record = capture_patches(python(edited), "sglang", tmp_path, Masker(), "", wheel_of_file(wheel))
    assert [each.is_masked for each in record.files] == [True]
    assert not [p for p in (tmp_path / "patches").rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
    plan = EnginePlan()
    plan_patches(python(copy(fresh, tmp_path / "other")), record, plan)
    assert "had a secret in it" in plan.refused[0]


def test_a_wheel_that_was_tampered_with_is_no_base(wheel: Path, tmp_path: Path) -> None:
    from ddtree.errors import UserError

    bad = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(bad, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name) + (b"# more\n" if name.endswith("graph.py") else b""))
    with pytest.raises(UserError, match=r"contradicts its own RECORD in sglang/srt/graph\.py"):
        wheel_of_file(bad)
    shutil.rmtree(tmp_path)
