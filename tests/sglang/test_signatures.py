"""The table of what the plugin stands on, against SGLang's released sources."""

import logging
from pathlib import Path

import pytest

from ddtree.sglang import plugin, signatures
from ddtree.sglang.signatures import RELEASES, differences, release_of
from sglang_sources import sglang_source


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.5.16", "0.5.16"), ("0.5.17", "0.5.17"), ("0.5.18", "0.5.17"), ("0.5.23", "0.5.23")],
)
def test_supported_releases_are_like_one_that_is_known(version: str, release: str) -> None:
    assert release_of(sglang_source(version) / "sglang" / "srt") == (release, [])


@pytest.mark.parametrize(
    ("version", "release", "difference"),
    [
        ("0.5.16", "0.5.17", "get_spec of runtime_context.py is absent"),
        ("0.5.18", "0.5.23", "mem_cache/kv_loc_plan.py is absent"),
        ("0.5.23", "0.5.17", "DFlashWorkerV2.__init__ of speculative/dflash_worker_v2.py has no parameter ps"),
    ],
)
def test_releases_are_told_apart_by_name(version: str, release: str, difference: str) -> None:
    assert difference in differences(sglang_source(version) / "sglang" / "srt", RELEASES[release])


def test_what_fits_nothing_is_held_against_the_nearest(tmp_path: Path) -> None:
    """0.5.23 without one of its own functions differs from that one alone, not from all that 0.5.16 has besides."""
    whole = sglang_source("0.5.23") / "sglang" / "srt"
    places = {place.split(":")[0] for needs in RELEASES["0.5.23"] for place in needs}
    for file in places:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        text = (whole / file).read_text()
        (tmp_path / file).write_text(text.replace("def own_plan(", "def another_plan("))
    assert release_of(tmp_path) == (None, ["KVIndexTranslator.own_plan of mem_cache/kv_index_translator.py is absent"])


ENTRIES = sorted({(p, a) for needs in RELEASES.values() for part in needs for p, a in part.items()})


@pytest.mark.parametrize(("place", "parameters"), ENTRIES)
def test_every_entry_is_looked_for(place: str, parameters: tuple[str, ...], tmp_path: Path) -> None:
    """An SGLang without one of the names differs, and the difference names it."""
    file, name = place.split(":")
    needs = ({place: parameters},)
    assert differences(tmp_path, needs) == [f"{file} is absent"]
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    *classes, function = name.split(".")
    header = f"class {classes[0]}:\n    def other(self): ...\n" if classes else "x = 1\n"
    path.write_text(header)
    assert differences(tmp_path, needs) == [f"{name} of {file} is absent"]
    indent = "    " if classes else ""
    path.write_text(f"{header}{indent}def {function}(self): ...\n")
    missing = differences(tmp_path, needs)
    assert missing == ([f"{name} of {file} has no parameter {', '.join(parameters)}"] if parameters else [])


def test_an_unknown_sglang_is_named_in_one_line_and_left_alone(monkeypatch, caplog) -> None:
    monkeypatch.setattr(
        signatures, "check_installed", lambda: ("9.9.9", None, ["f of g.py is absent", "h.py is absent"])
    )
    with caplog.at_level(logging.ERROR):
        plugin.register()
    (record,) = caplog.records
    assert "9.9.9" in record.message and "f of g.py is absent; h.py is absent" in record.message
    assert "\n" not in record.message
