"""A place for process deployments, and a real systemd host."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree.deploy import Deployment, to_deployment
from ddtree.deploy.apply import stop

from .systemd_host import NoSuchHost, SystemdHost, systemd_host


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where process deployments keep their state in this test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "ddtree"


Make = Callable[..., Deployment]


@pytest.fixture
def make(tmp_path: Path, state_home: Path) -> Iterator[Make]:
    """Makes process deployments of the stand-in engine; whatever runs in the end is stopped."""
    engine = tmp_path / "an engine $HOME 'quoted'"
    source = (Path(__file__).parent / "stand_in_engine.py").read_text()
    engine.write_text(f"#!{sys.executable}\n{source}")
    engine.chmod(0o755)
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    port = free_port()
    made: dict[str, Deployment] = {}

    def make_one(fault: str = "", *, name: str = "stand-in", budget: int = 8, **changes: Any) -> Deployment:
        data: dict[str, Any] = {
            "engine": {"kind": "native", "executable": str(engine)},
            "model": {"path": str(weights), "served_name": "m"},
            "drafter": {"path": str(weights)},
            "speculation": {"algorithm": "ddtree", "budget": budget},
            "runtime": {"device": "cpu", **({"env": {"FAULT": fault}} if fault else {})},
            "service": {
                "name": name,
                "supervisor": "process",
                "port": port,
                "ready_timeout_s": 20,
                "stop_timeout_s": 5,
            },
        }
        for dotted, value in changes.items():
            section, key = dotted.split("__")
            data.setdefault(section, {})[key] = value
        made[name] = to_deployment(data, folder=tmp_path)
        return made[name]

    yield make_one
    for deployment in made.values():
        stop(deployment)
    shutil.rmtree(state_home, ignore_errors=True)


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Iterator[SystemdHost]:
    """A real systemd host with an SSH server; where there can be none, its tests are skipped, and say so."""
    from ddtree.demo import drafter_folder

    mounts = {target_folder: "/opt/models/target", drafter_folder(): "/opt/models/drafter"}
    running = systemd_host(tmp_path_factory.mktemp("host"), mounts)
    try:
        booted = running.__enter__()
    except NoSuchHost as reason:
        print(f"\nNO SYSTEMD HOST, SO DEPLOYMENT IS NOT TESTED END TO END: {reason}", file=sys.__stderr__, flush=True)
        pytest.skip(f"no systemd host: {reason}")
    try:
        yield booted
    finally:
        running.__exit__(None, None, None)


def processes_with(text: str) -> list[int]:
    """Processes whose command line or environment holds ``text``."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (place / "environ").read_bytes() + (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def to_toml(data: dict[str, Any]) -> str:
    """TOML of tables of plain values: JSON's strings, numbers and lists are TOML's too."""
    lines = []
    for section, table in data.items():
        for key, value in table.items():
            inner = {f"{section}.{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {}
            lines += [f"{name} = {_inline(one)}" for name, one in (inner or {f"{section}.{key}": value}).items()]
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_inline(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)
