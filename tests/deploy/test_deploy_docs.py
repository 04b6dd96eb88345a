"""docs/deploy.md: its reference is the schema's, its examples run, and what it names is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree.cli.deploy import deploy_app

from .reference import PAGE, in_page, reference
from .test_deployment import EXAMPLES

TEXT = PAGE.read_text(encoding="utf-8")
ROOT = PAGE.parents[1]


def test_every_key_is_told_as_the_schema_has_it() -> None:
    assert in_page(TEXT) == reference(), "python tests/deploy/reference.py writes it"


def test_every_example_and_command_is_told() -> None:
    assert {path.name for path in EXAMPLES} == set(re.findall(r"^\| `([\w.-]+\.toml)`", TEXT, re.MULTILINE))
    verbs = {command.name for command in deploy_app.registered_commands}
    assert verbs == set(re.findall(r"^\| `(\w+)(?: FILE)?` \|", TEXT, re.MULTILINE)) & verbs


def test_python(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "'serve'" in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["apply", "status", "stop"])
def test_the_first_commands_are_those_that_a_test_runs(name: str) -> None:
    """tests/deploy/test_deploy_command.py runs them, with a port of its own."""
    assert f"$ ddtree deploy {name} examples/deployments/demo-cpu.toml" in TEXT
