"""The finished kits in examples/kits: whole, small, without weights, and what the docs say of them is so."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree.kit import bag
from ddtree.kit.check import check_folder

ROOT = Path(__file__).parents[2]
KITS = sorted((ROOT / "examples" / "kits").iterdir())
DOCS = (ROOT / "docs" / "kit.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kit", KITS, ids=lambda kit: kit.name)
def test_it_is_whole_and_small(kit: Path) -> None:
    found = check_folder(kit)
    assert found.faults == [] and found.kit is not None and found.kit.verdict == "proven"
    assert found.total_bytes < 2_000_000 and found.kit.experiments
    subprocess.run(["sha256sum", "--quiet", "-c", bag.MANIFEST, bag.TAG_MANIFEST], cwd=kit, check=True)
    subprocess.run([sys.executable, "-m", "bagit", "--quiet", "--validate", str(kit)], check=True)
    assert not [path for path in kit.rglob("*") if path.suffix in (".safetensors", ".gguf", ".bin", ".pt")]
    for path in kit.rglob("*"):
        if path.is_file():
            assert not re.search(rb"/(root|(home|work|tmp)/)|BEGIN [A-Z ]*PRIVATE KEY", path.read_bytes()), path


def test_there_is_one() -> None:
    assert KITS


@pytest.mark.parametrize("command", re.findall(r"^\$ (ddtree .*)$", DOCS, re.MULTILINE))
def test_commands_of_the_docs(command: str) -> None:
    words = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "ddtree", *words], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and done.stdout and "Traceback" not in done.stderr, done.stderr


def test_verbs_and_flags_of_the_docs_exist() -> None:
    import typer.main

    from ddtree.cli.kit import kit_app

    group = typer.main.get_command(kit_app)
    known = {flag for verb in group.commands.values() for p in verb.params for flag in p.opts + p.secondary_opts}
    others = {"--require-hashes", "--quiet", "--validate", "--record"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", DOCS)) - {"--api-key"} <= known | others
    verbs = set(re.findall(r"ddtree kit ([a-z]+)", DOCS)) | set(re.findall(r"^\| `([a-z]+) ", DOCS, re.MULTILINE))
    assert verbs and verbs - {"checks"} <= set(group.commands), verbs
