"""The Dockerfile, as far as it can be tried without a container engine: its files, its install, its health check."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import httpx
import pytest
from live import live, tiny_loader

ROOT = Path(__file__).parents[2]
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8")).splitlines()
STEPS = [line.split(None, 1) for line in LINES if line.strip() and not line.startswith("#")]
KNOWN = {
    *("ARG", "FROM", "RUN", "ENV", "COPY", "VOLUME", "WORKDIR", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"),
    "USER",
}


def stages() -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for step in STEPS:
        if step[0] == "FROM":
            current = found.setdefault(step[1].split()[-1], [])
        if found:
            current.append(step)
    return found


def of(kind: str) -> list[str]:
    return [rest for word, rest in STEPS if word == kind]


def test_every_step_is_one_that_docker_knows():
    assert {word for word, _ in STEPS} <= KNOWN
    names = list(stages())
    for name, steps in stages().items():
        base = steps[0][1].split()[0]
        assert base == "${BASE}" or base in names[: names.index(name)], f"{name} builds on {base}"
    for copy in of("COPY"):
        if copy.startswith("--from="):
            assert copy.split()[0].removeprefix("--from=") in names


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_targets_run_as_nobody_special(target):
    assert stages()[target][-1] == ["USER", "10001:10001"]
    assert any(step == ["COPY", f"--from=build-{target} /opt/ddtree /opt/ddtree"] for step in stages()[target])
    assert stages()[target][0][1].startswith("runtime "), "with its entry point and its health check"


def test_what_is_copied_exists_and_is_not_ignored():
    rules = (ROOT / ".dockerignore").read_text().split()
    assert rules[0] == "*", "only what is named goes into a build"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    sources = {part for copy in of("COPY") if "--from" not in copy for part in copy.split()[:-1]}
    assert sources == kept
    for source in sources:
        assert (ROOT / source).exists()
        assert not any(fnmatch.fnmatch(source, rule) for rule in rules[1:] if not rule.startswith("!"))


def test_what_is_copied_is_enough_to_install(tmp_path):
    """The install step, from the copied files alone; what it needs besides is the extra's affair."""
    for source in {part for copy in of("COPY") if "--from" not in copy for part in copy.split()[:-1]}:
        path = ROOT / source
        if path.is_dir():
            shutil.copytree(path, tmp_path / "source" / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (tmp_path / "source").mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / "source" / source)
    assert of("RUN").count('pip install "/source[server]"') == 2
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--quiet",
        "--wheel-dir",
        tmp_path,
        tmp_path / "source",
    ]
    subprocess.run([str(part) for part in command], check=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        metadata = packed.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert "ddtree/server/page.html" in names and "ddtree/demo/drafter/model.safetensors" in names
    assert any(name.endswith(".cu") for name in names)
    assert "Provides-Extra: server" in metadata


def health_check() -> list[str]:
    (line,) = of("HEALTHCHECK")
    return json.loads(line[line.index("CMD") + 3 :])


def test_the_health_check_asks_whether_the_server_is_ready(tiny_folders):
    may_load = threading.Event()
    load = tiny_loader(tiny_folders)

    def slow(tell):
        may_load.wait(30)
        return load(tell)

    command = [sys.executable, *health_check()[1:]]
    with live(slow, wait=False) as server:
        environment = os.environ | {"DDTREE_PORT": str(server.address[1])}

        def check() -> int:
            done = subprocess.run(command, env=environment, capture_output=True, timeout=20, check=False)
            return done.returncode

        assert check() != 0, "it listens, and is not ready"
        may_load.set()
        while httpx.get(f"{server.url}/ready").status_code != 200:
            pass
        assert check() == 0
    assert check() != 0, "nobody listens"


def test_the_entry_point_hands_arguments_on(tmp_path):
    """Run as it stands, with a `ddtree` that prints what it was called with, and without the init process."""
    entry = json.loads(of("ENTRYPOINT")[0])
    assert entry[:2] == ["tini", "--"]
    fake = tmp_path / "ddtree"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "DDTREE_PORT": "8000"}
    done = subprocess.run(
        [*entry[2:], "--model", "a b", "--insecure"], env=environment, capture_output=True, text=True, check=True
    )
    called = ["serve", "--host", "0.0.0.0", "--port", "8000", "--model", "a b", "--insecure"]
    assert done.stdout.splitlines() == called
    helped = subprocess.run(
        [sys.executable, "-m", "ddtree", "serve", "--help"], capture_output=True, text=True, check=True
    )
    assert all(flag in helped.stdout for flag in ("--host", "--port", "--insecure"))


def test_shell_lines_can_be_read():
    for line in of("RUN"):
        assert shlex.split(line)
        subprocess.run(["sh", "-n", "-c", line], check=True)
