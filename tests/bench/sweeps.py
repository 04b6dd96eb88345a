"""Sweep files, the command that runs them, and what came of it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

from ddtree.bench.result_folder import read_requests, read_units
from ddtree.bench.sweep.store import read_points

ENGINE = Path(__file__).with_name("fake_engine.py")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_sweep(folder, text):
    (folder / "s.toml").write_text(
        """
        deployment = "d.toml"
        [bench]
        workloads = ["w.jsonl"]
        repeats = 2
        requests = 2
        max_tokens = 64
        warm_up = 1
        [verify]
        enabled = false
        """
        + text
    )
    return folder / "s.toml"


def ddtree(*arguments, check=True):
    done = subprocess.run(
        [sys.executable, "-m", "ddtree", *map(str, arguments)], capture_output=True, text=True, timeout=240
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def shape(out):
    """Points, units and requests, and how often each."""
    points = Counter((row.point, row.status, row.variant) for row in read_points(out))
    units: Counter = Counter()
    requests: Counter = Counter()
    for run in sorted(out.rglob("run.json")):
        where = str(run.parent.relative_to(out))
        units.update((where, unit.unit) for unit in read_units(run.parent))
        requests.update((where, row.unit, row.prompt_id, row.error_kind) for row in read_requests(run.parent))
    return points, units, requests
