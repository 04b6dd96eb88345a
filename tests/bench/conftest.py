"""A deployment whose engine is played by a real HTTP server."""

from __future__ import annotations

import json
import os
import sys

import pytest

from bench.sweeps import ENGINE, free_port
from ddtree.deploy import load_deployment
from ddtree.deploy.apply import stop


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A deployment and a sweep in a folder, with the service's state apart from the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    program = tmp_path / "ddtree"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {ENGINE} "$@"\n')
    program.chmod(0o755)
    (tmp_path / "d.toml").write_text(
        f"""
        engine = {{ kind = "native", executable = "{program}" }}
        model = {{ demo = true }}
        speculation = {{ algorithm = "ddtree", budget = 16 }}
        runtime = {{ device = "cpu" }}
        service = {{ name = "t{os.getpid()}", supervisor = "process", port = {free_port()}, ready_timeout_s = 60.0 }}
        """
    )
    (tmp_path / "w.jsonl").write_text(
        "".join(json.dumps({"id": f"p{i}", "turns": [f"word {i}"]}) + "\n" for i in range(3))
    )
    yield tmp_path
    stop(load_deployment(tmp_path / "d.toml"))
