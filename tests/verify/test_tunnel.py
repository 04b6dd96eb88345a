"""A deployment on another machine's loopback is reached through its SSH connection, or that is said."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from ddtree.cli.main import run
from ddtree.cli.verify_target import Declared, resolve

FILE = """
engine = {{ kind = "native", venv = "/v" }}
model = {{ demo = true }}
speculation = {{ algorithm = "ddtree", budget = 8 }}
runtime = {{ device = "cpu" }}
service = {{ name = "x", supervisor = "process", port = 8021 }}
host = {{ kind = "ssh", address = "127.0.0.1", port = {port}, known_hosts_file = "none" }}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = tmp_path / "x.toml"
    path.write_text(FILE.format(port=port))
    return path


def test_loopback_of_another_machine(file: Path) -> None:
    target = resolve(str(file), None, Declared())
    assert target.tunnel is not None and target.url == "http://127.0.0.1:8021 on 127.0.0.1"
    given = resolve(str(file), "http://127.0.0.1:9", Declared())
    assert given.tunnel is None and given.url == "http://127.0.0.1:9"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh client")
def test_a_machine_that_is_not_reached(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(file), "--json"]) == 3
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["status"] == "unknown" and "cannot reach 127.0.0.1" in finding["evidence"][0]
