"""A broken web server and a small hub, both real HTTP on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from broken_web import Web, running

from ddtree.demo import download as download_module


@pytest.fixture
def web():
    with running(Web()) as server:
        yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(download_module, "_PAUSE_S", 0.0)
