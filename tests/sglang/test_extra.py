"""The extra ``[sglang]`` asks for no package: beside an SGLang, whose needs are pinned, it moves no version."""

import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sglang_sources import VERSIONS, sglang_source

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[list[Requirement], list[str]]:
    """Requirements and extras in the metadata of a wheel that is built from this checkout, by its own backend."""
    folder = tmp_path_factory.mktemp("wheel")
    command = ["-m", "pip", "wheel", "--no-deps", "--disable-pip-version-check", "-q", "-w", str(folder), str(ROOT)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=200)
    if done.returncode and "hatchling" in done.stderr and "No matching distribution" in done.stderr:
        pytest.skip("the build backend hatchling cannot be fetched")
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        told = Parser().parsestr(archive.read(name).decode())
    return [Requirement(line) for line in told.get_all("Requires-Dist", [])], told.get_all("Provides-Extra", [])


def wanted(requirements: list[Requirement], extra: str) -> set[str]:
    """Names that an installation with ``extra`` asks for."""
    return {r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra})}


def test_the_extra_is_there_and_asks_for_nothing_of_its_own(built) -> None:
    requirements, extras = built
    assert "sglang" in extras
    assert wanted(requirements, "sglang") == wanted(requirements, "")
    assert wanted(requirements, "engine") > wanted(requirements, "")  # so that the line above can fail


def test_nothing_that_sglang_pins_is_asked_for(built) -> None:
    """What every installation asks for has no upper bound and is nothing of CUDA's or torch's kind."""
    requirements, _ = built
    plain = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": "sglang"})]
    assert {r.name for r in plain}.isdisjoint({"torch", "triton", "transformers", "tokenizers", "sglang", "flashinfer"})
    for requirement in plain:
        assert {clause.operator for clause in requirement.specifier} <= {">="}, requirement


@pytest.mark.parametrize("version", VERSIONS)
def test_what_sglang_pins_satisfies_all_that_is_asked_for(built, version) -> None:
    requirements, _ = built
    (info,) = sglang_source(version).glob("sglang-*.dist-info/METADATA")
    theirs = [Requirement(line) for line in Parser().parsestr(info.read_text()).get_all("Requires-Dist", [])]
    pins = {r.name: c.version for r in theirs for c in r.specifier if c.operator == "==" and r.marker is None}
    assert "torch" in pins and "transformers" in pins
    for requirement in requirements:
        if requirement.name in pins and wanted([requirement], "sglang"):
            assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_the_plugin_is_found_by_its_entry_point() -> None:
    (point,) = (p for p in distribution("ddtree").entry_points if p.group == "sglang.srt.plugins")
    assert point.value == "ddtree.sglang.plugin:register"
