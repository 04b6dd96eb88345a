"""``ddtree deploy`` as a person runs it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ddtree.cli.main import run

from .conftest import Make, free_port, to_toml
from .test_deployment import EXAMPLES

DEMO = next(path for path in EXAMPLES if path.stem == "demo-cpu")


@dataclass(frozen=True)
class Done:
    exit_code: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def ddtree(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `ddtree deploy ...` as its entry point does, without a new interpreter each time."""

    def call(*arguments: str | Path) -> Done:
        capsys.readouterr()
        exit_code = run(["deploy", *map(str, arguments)])
        return Done(exit_code, *capsys.readouterr())

    return call


def is_refused(done: Done, *words: str) -> bool:
    assert (done.exit_code, done.stdout) == (2, ""), done
    lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("looking at")]
    assert len(lines) == 1 and lines[0].startswith("ddtree"), done.stderr
    return all(word in lines[0] for word in words)


@pytest.fixture
def file(make: Make, tmp_path: Path) -> Path:
    path = tmp_path / "deployment.toml"
    path.write_text(to_toml(make().model_dump(mode="json", exclude_unset=True)))
    return path


def test_schema_and_render(ddtree: Run) -> None:
    schema = json.loads(ddtree("schema").stdout)
    assert schema["properties"].keys() >= {"engine", "model", "speculation", "service", "host"}

    kimi = next(path for path in EXAMPLES if path.stem == "kimi-k2.6-8x-b300")
    unit = ddtree("render", kimi, "--unit").stdout
    words = shlex.split(ddtree("render", kimi, "--command").stdout)
    assert f"ExecStart=:{shlex.join(words)}" in unit.splitlines()
    told = json.loads(ddtree("render", kimi, "--json").stdout)
    assert told["command"] == words and told["unit"] == unit and told["unit_name"] == "kimi-k2.6.service"
    everything = ddtree("render", DEMO).stdout
    assert "--budget 16" in everything and "PYTHONUNBUFFERED=1" in everything


def test_bad_input_is_one_line(ddtree: Run, tmp_path: Path, file: Path) -> None:
    assert is_refused(ddtree("render", tmp_path / "none.toml"), "cannot read")
    assert is_refused(ddtree("render", DEMO, "--unit", "--json"), "exclude each other")
    assert is_refused(ddtree("render", DEMO, "--unit"), "which has none")
    file.write_text(file.read_text().replace("budget", "bugdet"))
    for verb in ("render", "diff", "apply", "rollback", "status", "logs", "stop", "history"):
        assert is_refused(ddtree(verb, file), "unknown key speculation.bugdet: did you mean budget?")


def test_a_service_from_apply_to_stop(ddtree: Run, file: Path) -> None:
    assert is_refused(ddtree("rollback", file), "no earlier good release")
    assert ddtree("status", file).exit_code == 1
    assert ddtree("diff", file).exit_code == 1
    applied = ddtree("apply", file, "--note", "first one", "--json")
    assert applied.exit_code == 0, applied.stderr
    release = json.loads(applied.stdout)["release"]
    assert release["note"] == "first one" and release["state"] == "good"
    assert ddtree("diff", file).exit_code == 0
    shown = ddtree("status", file)
    assert shown.exit_code == 0 and f"process    {release['identity']['pid']}" in shown.stdout
    assert "engine starts with budget 8" in ddtree("logs", file).stdout

    good = file.read_text()
    file.write_text(good + 'runtime.env.FAULT = "die"\n')
    failed = ddtree("apply", file)
    assert failed.exit_code == 1 and failed.stdout == ""
    assert "out of memory, of all things" in failed.stderr and "release 1 runs again" in failed.stderr
    file.write_text(good)
    listed = ddtree("history", file).stdout.splitlines()
    assert "good" in listed[1] and "failed" in listed[2]
    assert ddtree("stop", file).stdout == "stopped\n"


def test_ctrl_c_brings_the_old_one_back(ddtree: Run, file: Path) -> None:
    assert ddtree("apply", file).exit_code == 0
    good = file.read_text()
    file.write_text(good + 'runtime.env.FAULT = "hang"\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "ddtree", "deploy", "apply", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr
    for line in process.stderr:
        if line.startswith("answering"):
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    rest = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert "failed: interrupted" in rest and "release 1 runs again" in rest
    process.stdout.close() if process.stdout else None
    file.write_text(good)
    assert ddtree("status", file).exit_code == 0


def test_the_demo_from_its_example(ddtree: Run, tmp_path: Path, state_home: Path, target_folder: Path) -> None:
    """What the docs tell a newcomer to do, on a port of the test's own; the service outlives the command."""
    port = free_port()
    file = tmp_path / "demo.toml"
    text = DEMO.read_text().replace("port = 8021", f"port = {port}").replace("2048", "512\nthreads = 1")
    file.write_text(text)
    try:
        applied = ddtree("apply", file)
        assert applied.exit_code == 0, applied.stderr
        assert "warming up" in applied.stderr or "loading the model" in applied.stderr
        body: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60, trust_env=False).json()
        assert answer["ddtree"]["mode"] == "tree" and answer["ddtree"]["budget"] == 16
    finally:
        stopped = ddtree("stop", file)
    assert stopped.stdout == "stopped\n", stopped
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
        except httpx.TransportError:
            return
    raise AssertionError("it still answers")
