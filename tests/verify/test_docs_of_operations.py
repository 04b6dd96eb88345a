"""Commands in the docs of verify, doctor and fetch name verbs and flags that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from ddtree.cli.main import app

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("verify", "doctor", "fetch")


def commands(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\$ (ddtree .*)$", text, re.MULTILINE)
    inline = re.findall(r"`(ddtree [^`]+)`", text)
    return [line for line in shown + inline if line.split()[1] in PAGES]


@pytest.mark.parametrize("page", PAGES)
def test_commands_can_be_parsed(page):
    lines = commands(page)
    assert lines
    group = typer.main.get_command(app)
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        verb = group.commands[words[0]]
        known = {flag for parameter in verb.params for flag in parameter.opts + parameter.secondary_opts} | {"--help"}
        assert {word.split("=")[0] for word in words if word.startswith("-")} <= known, line


@pytest.mark.parametrize("page", PAGES)
def test_flags_in_the_text_exist(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    group = typer.main.get_command(app)
    known = {flag for verb in PAGES for p in group.commands[verb].params for flag in p.opts + p.secondary_opts}
    told = set(re.findall(r"`(--[a-z-]+)[ `]", text))
    assert told - known <= {"--enable-metrics", "--help", "--enable-nccl-nvls", "--now"}
