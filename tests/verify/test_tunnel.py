"""A deployment on another machine is reached through its SSH connection, or that is said."""

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


OPEN = "allow_unauthenticated = true"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = tmp_path / "x.toml"
    path.write_text(FILE.format(port=port))
    return path


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "192.0.2.7"])
def test_another_machine_is_asked_through_its_ssh_connection(file: Path, address: str) -> None:
    """Whatever the service listens on: its key must not cross the network in the clear."""
    file.write_text(file.read_text().replace("port = 8021", f'port = 8021, address = "{address}", {OPEN}'))
    target = resolve(str(file), None, Declared())
    at = "127.0.0.1" if address == "0.0.0.0" else address
    assert target.tunnel is not None and target.url == f"http://{at}:8021 on 127.0.0.1"
    given = resolve(str(file), "http://127.0.0.1:9", Declared())
    assert given.tunnel is None and given.url == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("url", "told"),
    [("http://192.0.2.1:8000", True), ("https://192.0.2.1", False), ("http://127.0.0.1:8000", False)],
)
def test_a_key_in_the_clear_is_told(url: str, told: bool) -> None:
    target = resolve(url, None, Declared())
    assert target.exposes("a-key") is told and not target.exposes(None)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh client")
def test_a_machine_that_is_not_reached(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(file), "--json"]) == 3
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["status"] == "unknown" and "cannot reach 127.0.0.1" in finding["evidence"][0]
