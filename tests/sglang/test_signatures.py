"""The table of what the plugin stands on, against SGLang's released sources."""

import logging
from pathlib import Path

import pytest

from ddtree.sglang import plugin, signatures
from ddtree.sglang.signatures import NEEDED, differences
from sglang_sources import sglang_source


@pytest.mark.parametrize("version", ["0.5.16", "0.5.17"])
def test_supported_releases_have_all_that_is_needed(version: str) -> None:
    assert differences(sglang_source(version) / "sglang" / "srt") == []


@pytest.mark.parametrize(
    ("version", "difference"),
    [
        ("0.5.18", "ServerArgs.override of server_args.py is absent"),
        ("0.5.23", "DFlashWorkerV2.__init__ of speculative/dflash_worker_v2.py has no parameter ps"),
    ],
)
def test_other_releases_are_told_apart_by_name(version: str, difference: str) -> None:
    assert difference in differences(sglang_source(version) / "sglang" / "srt")


@pytest.mark.parametrize("place", NEEDED)
def test_every_entry_is_looked_for(place: str, tmp_path: Path) -> None:
    """An SGLang without one of the names differs, and the difference names it."""
    file, name = place.split(":")
    assert differences(tmp_path, {place: NEEDED[place]}) == [f"{file} is absent"]
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    *classes, function = name.split(".")
    header = f"class {classes[0]}:\n    def other(self): ...\n" if classes else "x = 1\n"
    path.write_text(header)
    assert differences(tmp_path, {place: NEEDED[place]}) == [f"{name} of {file} is absent"]
    indent = "    " if classes else ""
    path.write_text(f"{header}{indent}def {function}(self): ...\n")
    missing = differences(tmp_path, {place: NEEDED[place]})
    assert missing == ([f"{name} of {file} has no parameter {', '.join(NEEDED[place])}"] if NEEDED[place] else [])


def test_an_unknown_sglang_is_named_in_one_line_and_left_alone(monkeypatch, caplog) -> None:
    monkeypatch.setattr(signatures, "check_installed", lambda: ("9.9.9", ["f of g.py is absent", "h.py is absent"]))
    with caplog.at_level(logging.ERROR):
        plugin.register()
    (record,) = caplog.records
    assert "9.9.9" in record.message and "f of g.py is absent; h.py is absent" in record.message
    assert "\n" not in record.message
