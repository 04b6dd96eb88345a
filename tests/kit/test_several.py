"""One kit of several deployments: each with its own folder, verdict and way back."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree.errors import UserError
from ddtree.kit.capture import CaptureOptions, read_source
from ddtree.kit.check import check_folder
from ddtree.kit.create import CreateOptions, create
from ddtree.kit.open_kit import whole_kit
from ddtree.kit.record import FetchList, read_record
from ddtree.kit.restore import RestoreOptions, plan_restore

from .conftest import free_port


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two services that do not run, each with weights of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    written = []
    for name in ("first", "second-one"):
        weights = tmp_path / "weights" / name
        weights.mkdir(parents=True)
        (weights / "config.json").write_text(f'{{"of": "{name}"}}')
        file = tmp_path / f"{name}.toml"
        file.write_text(
            f"""
            engine = {{ kind = "native", executable = "/bin/sh" }}
            model = {{ path = "{weights}", served_name = "m" }}
            speculation = {{ algorithm = "none" }}
            runtime = {{ device = "cpu" }}
            service = {{ name = "{name}", supervisor = "process", port = {free_port()} }}
            """
        )
        written.append(file)
    return written


def options(files: list[Path], out: Path, **more: bool) -> CreateOptions:
    sources = tuple(map(read_source, files))
    return CreateOptions(out=out, sources=sources, capture=CaptureOptions(hashes=False), **more)


def test_each_has_its_folder_and_can_be_restored(files: list[Path], tmp_path: Path) -> None:
    kit = create(options(files, tmp_path / "kit", even_if_failing=True))
    assert [(place.name, place.folder) for place in kit.places] == [("first", "."), ("second-one", "more/second-one")]
    assert kit.verdict == "unknown" and check_folder(tmp_path / "kit").is_whole
    with whole_kit(tmp_path / "kit") as (payload, record):
        for place in record.places:
            assert (payload / place.folder / "deployment.toml").read_text() == (
                tmp_path / f"{place.name}.toml"
            ).read_text()
            fetch = read_record(FetchList, payload / place.folder / "model" / "fetch.json")
            assert fetch.path == str(tmp_path / "weights" / place.name)
        steps = plan_restore(payload, record, RestoreOptions(place="second-one"))
        assert any("install and start second-one" in step.told for step in steps)
        with pytest.raises(UserError, match="it has first, second-one"):
            plan_restore(payload, record, RestoreOptions(place="third"))
    guide = (tmp_path / "kit/data/README.md").read_text()
    assert "## first" in guide and "## second-one" in guide and "service did not run" in guide


def test_a_service_that_does_not_run_is_sealed_on_purpose_only(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not sealed: first is not proven"):
        create(options(files, tmp_path / "kit"))
    with pytest.raises(UserError, match="two deployments are called first"):
        create(options([files[0], files[0]], tmp_path / "kit", even_if_failing=True))
    assert not (tmp_path / "kit").exists() and not list(tmp_path.glob(".kit*"))
