"""The examples in the docs run as they are written."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOW_TO = (ROOT / "docs" / "how-to.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", HOW_TO, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", blocks("console"), ids=lambda b: b.splitlines()[-1][:60])
def test_commands(block, tmp_path, target_folder):
    commands = [line.removeprefix("$ ") for line in block.splitlines()]
    ddtree = f"{shlex.quote(sys.executable)} -m ddtree"
    script = "\n".join(command.replace(".venv/bin/ddtree", ddtree) for command in commands)
    done = subprocess.run(["sh", "-ec", script], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_python(tmp_path, target_folder):
    (block,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("0 None\n") or "NearTie" in done.stdout


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                goal = page.parent / link if link else page
                assert goal.exists(), f"{page.name}: {link}"
                assert not anchor or anchor in anchors(goal), f"{page.name}: {link}#{anchor}"
