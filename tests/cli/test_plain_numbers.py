"""Numbers on the command line: plain ones are taken, all others are told in one line."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest

from ddtree.cli.bench import bench
from ddtree.cli.chat import chat
from ddtree.cli.demo import demo
from ddtree.cli.generate import generate
from ddtree.cli.grade import grade
from ddtree.cli.main import run
from ddtree.cli.options import with_option_groups
from ddtree.cli.serve import serve
from ddtree.cli.verify import verify


@pytest.mark.parametrize("text", ["1_0", " 1", "1 ", "٣", "1.0", "0x10", "", "9" * 5000, "1e3"])
@pytest.mark.parametrize("flag", ["--port", "--max-queue", "--max-batch", "--threads"])
def test_whole_numbers(capsys: pytest.CaptureFixture[str], flag: str, text: str) -> None:
    assert run(["serve", flag, text]) == 2
    told = capsys.readouterr().err
    assert "is no plain number" in told and flag in told and told.count("\n") == 1 and len(told) < 200


@pytest.mark.parametrize("text", ["1_0.5", " 1.5", "nan", "inf", "1,5", "٣.٣", "1e"])
def test_other_numbers(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert run(["serve", "--queue-timeout", text]) == 2
    assert "is no plain number" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [demo, generate, chat, serve, bench, verify, grade], ids=lambda verb: verb.__name__)
def test_every_number_of_every_verb_is_read_plainly(verb: Any) -> None:
    for parameter in inspect.signature(with_option_groups(verb)).parameters.values():
        kind, option, *_ = get_args(parameter.annotation)
        if {int, float} & {kind, *get_args(kind)}:
            assert option.parser is not None, parameter.name


def test_plain_numbers_are_taken_and_ranges_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--max-queue", "-1"]) == 2
    assert "-1 is out of range: choose a whole number at least 0" in capsys.readouterr().err
    for flag, text in (("--queue-timeout", "1e3"), ("--queue-timeout", ".5"), ("--max-queue", "+7")):
        assert run(["serve", flag, text, "--port", "99999"]) == 2
        assert "port 99999 is not possible" in capsys.readouterr().err


def test_a_stop_string_with_half_a_character(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--model", "/none", "--stop", "a\udcff", "--prompt", "hello"]) == 2
    assert "stop is" in capsys.readouterr().err
