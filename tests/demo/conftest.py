"""Fixtures: a file server with chosen faults, and a tiny stand-in for the target's wheel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from file_server import FileServer, running_file_server


@pytest.fixture
def server() -> Iterator[FileServer]:
    with running_file_server() as running:
        yield running
