"""The laptop example: its files are what they claim, without the half hour that it takes to run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ddtree.bench.grade.run import judge_references
from ddtree.bench.grade.sandbox import Limits, find_sandbox
from ddtree.bench.sweep.loaded import load_sweep
from ddtree.bench.workload import read_workload
from ddtree.cli.main import run
from ddtree.errors import UserError

EXAMPLE = Path(__file__).parents[2] / "examples" / "laptop-sweep"


def test_the_sweep_is_the_one_that_the_readme_tells():
    points = load_sweep(EXAMPLE / "sweep.toml").plan.points
    assert sum(point.runs for point in points) == 7 and not any(point.refused for point in points)


def test_a_dry_run(capsys, tmp_path):
    assert run(["sweep", str(EXAMPLE / "sweep.toml"), "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    told = capsys.readouterr().out
    minutes = int(re.search(r"in all \d+ requests, about (\d+) min", told).group(1))
    assert minutes < 20


def test_its_problems_have_solutions_that_pass():
    try:
        box = find_sandbox(Limits(wall_s=30.0), is_unsafe=False)
    except UserError as error:
        pytest.skip(f"no sandbox on this machine: {error}")
    problems = read_workload(str(EXAMPLE / "problems.jsonl"))
    assert {outcome.how for _, outcome in judge_references(problems, box)} == {"passed"}
    assert len(read_workload(str(EXAMPLE / "prompts.jsonl")).problems) == 12


def test_the_script_is_sound_and_its_commands_parse(capsys):
    script = (EXAMPLE / "run.sh").read_text()
    subprocess.run(["sh", "-n", str(EXAMPLE / "run.sh")], check=True)
    for verb, rest in re.findall(r"^\$ddtree (\w+) (.*)$", script, re.MULTILINE):
        flags = set(re.findall(r"(--[a-z-]+)", rest))
        run([verb, *(["apply"] if verb == "deploy" else []), "--help"])
        help_text = capsys.readouterr().out
        assert all(flag in help_text for flag in flags), (verb, flags)
