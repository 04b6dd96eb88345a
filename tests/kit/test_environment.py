"""The engine's environment: told with hashes, and built anew from the lock, hash by hash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddtree.deploy.host import Completed
from ddtree.deploy.local_host import LocalHost
from ddtree.errors import UserError
from ddtree.kit.engine_files import Interpreter
from ddtree.kit.lock import freeze, requirements, with_hashes
from ddtree.kit.record import EnvironmentRecord, Package
from ddtree.kit.restore_engine import EnginePlan, build, compare_packages, plan_build

from .engine_package import edit, engine_files, python

HERE = LocalHost("none")


def sealed_environment(venv: Path) -> EnvironmentRecord:
    told = python(venv).packages()
    assert told is not None
    return EnvironmentRecord(**told | {"packages": [Package(**each) for each in told["packages"]]})


def test_content_is_that_of_the_wheel_whatever_was_edited(fresh: Path, tmp_path: Path) -> None:
    import subprocess

    before = sealed_environment(fresh)
    other = tmp_path / "other"
    subprocess.run(["cp", "-a", str(fresh), str(other)], check=True)
    edit(other)
    assert compare_packages(python(other), before) == [], "edits are patches' business"
    assert {each.name: each.version for each in before.packages}["sglang"] == "0.5.17"
    changed = before.model_copy(
        update={
            "packages": [
                Package(name="sglang", version="0.5.16", origin="index"),
                Package(name="torch", version="2.11.0", origin="index"),
            ]
        }
    )
    assert compare_packages(python(other), changed) == [
        "sglang is 0.5.17, sealed was 0.5.16",
        "torch 2.11.0 is missing",
    ]
    content = [
        each.model_copy(update={"content_sha256": "0" * 64}) for each in before.packages if each.name == "sglang"
    ]
    rebuilt = compare_packages(python(other), before.model_copy(update={"packages": content}))
    assert rebuilt == ["sglang 0.5.17 is of another build"]


def test_it_is_built_from_the_lock(
    fresh: Path,
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    sealed = sealed_environment(fresh)
    venv = tmp_path / "venv"
    plan = EnginePlan()
    plan_build(HERE, str(venv), sealed, [], plan)
    assert plan.build and plan.refused == [
        "the lock has no hash for sglang==0.5.17: give their wheels with --wheels DIR"
    ]
    (venv / "bin").mkdir(parents=True)
    (venv / ".ddtree-kit-unfinished").touch()  # a restore was killed here
    plan = EnginePlan()
    plan_build(HERE, str(venv), sealed, [wheel], plan)
    assert plan.build and plan.python and not plan.refused
    build(HERE, str(venv), sealed, [wheel], plan.python)
    assert compare_packages(python(venv), sealed) == [] and engine_files(venv) == engine_files(fresh)
    assert not (venv / ".ddtree-kit-unfinished").exists() and not (venv / ".wheels").exists()
    plan = EnginePlan()
    plan_build(HERE, str(venv), sealed, [], plan)
    assert not plan.build, "what is finished is left alone"


def test_another_python_is_refused(fresh: Path, tmp_path: Path) -> None:
    sealed = sealed_environment(fresh).model_copy(update={"python": "3.7.1", "packages": []})
    plan = EnginePlan()
    plan_build(HERE, str(tmp_path / "venv"), sealed, [], plan)
    assert plan.refused == ["there is no Python 3.7 on this machine: install it"]


class IndexHost(LocalHost):
    """Its pip's index lacks one package: pip's own words, recorded."""

    def __init__(self) -> None:
        super().__init__("none")
        self.asked: list[list[str]] = []

    def run(self, script: str, *arguments: str, **options: object) -> Completed:  # type: ignore[override]
        wanted = [word for word in arguments if "==" in word]
        self.asked.append(wanted)
        if any(word.startswith("own-build") for word in wanted):
            told = "ERROR: Could not find a version\nERROR: No matching distribution found for own-build==1.0+cu130\n"
            return Completed(1, "", told)
        install = [
            {
                "metadata": {"name": name.replace("-", "_"), "version": version},
                "download_info": {"archive_info": {"hashes": {"sha256": name[0] * 64}}},
            }
            for name, _, version in (word.partition("==") for word in wanted)
        ]
        return Completed(0, json.dumps({"install": install}), "")


def test_hashes_come_from_the_index_where_it_has_them() -> None:
    packages = [
        Package(name="an-engine", version="1.2", origin="index"),
        Package(name="own-build", version="1.0+cu130", origin="index"),
        Package(name="checkout", version="0.1", origin="editable"),
    ]
    host = IndexHost()
    found, why = with_hashes(Interpreter(host, "/usr/bin/python3", {}), packages)
    assert why is None and [each.wheel_sha256 for each in found] == ["a" * 64, None, None]
    assert host.asked == [["an-engine==1.2", "own-build==1.0+cu130"], ["an-engine==1.2"]]
    assert requirements(found) == f"an-engine==1.2 --hash=sha256:{'a' * 64}\n"
    assert freeze(found).splitlines() == [
        "an-engine==1.2",
        "own-build==1.0+cu130  # no hash",
        "checkout==0.1  # no hash  # editable",
    ]


def test_a_wrong_hash_is_refused(
    fresh: Path,
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lock's hash is of another file than the one that pip finds."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    sealed = sealed_environment(fresh)
    wrong = [each.model_copy(update={"wheel_sha256": "0" * 64}) for each in sealed.packages if each.name == "sglang"]
    plan = EnginePlan()
    plan_build(HERE, str(tmp_path / "venv"), sealed.model_copy(update={"packages": wrong}), [], plan)
    assert plan.python
    with pytest.raises(UserError, match="pip did not install the lock"):
        build(HERE, str(tmp_path / "venv"), sealed.model_copy(update={"packages": wrong}), [], plan.python)
    plan = EnginePlan()
    plan_build(HERE, str(tmp_path / "venv"), sealed, [wheel], plan)
    assert plan.build, "the half-made one is made anew"
