"""The demo's pair on a real systemd host, over SSH: swept, sealed, and brought back to life on a second, fresh host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddtree.kit import bag
from ddtree.kit.check import check_folder
from ddtree.kit.record import KitRecord, ProcessRecord, read_record
from deploy.systemd_host import NoSuchHost, SystemdHost, systemd_host

from .conftest import ddtree

pytestmark = pytest.mark.timeout(1500)  # the host's image may have to be built first

KEY = "a-key-of-the-systemd-kit"
QUICK = ("--long-tokens", "0", "--concurrency", "1", "--probe-tokens", "24")
DEPLOYMENT = """
# SmolLM2-135M-Instruct and its drafter on the CPU of a machine that is reached by SSH.
[engine]
kind = "native"
venv = "/opt/ddtree"

[model]
path = "/opt/models/target"
served_name = "pair"

[drafter]
path = "/opt/models/drafter"

[speculation]
algorithm = "ddtree"
budget = 16

[runtime]
device = "cpu"
threads = 1
context_length = 512
max_running_requests = 1

[service]
name = "demo-pair"
port = 8123
ready_timeout_s = 300

[secrets]
api_key = { file = "api_key" }

[host]
kind = "ssh"
address = "ADDRESS"
user = "deploy"
privilege = "sudo"
identity_file = "key"
known_hosts_file = "known_hosts"
"""
SWEEP = """
deployment = "deployment.toml"

[bench]
workloads = ["prompts.jsonl"]
repeats = 2
requests = 2
max_tokens = 24
warm_up = 1

[verify]
probe_tokens = 24
long_tokens = 0
concurrency = 1

[[sweep]]
name = "budget"
[sweep.grid]
"speculation.budget" = [4, 16]
"""
PROMPTS = [
    {"id": "count", "turns": ["Count from one to ten in words."]},
    {"id": "days", "turns": ["Name the days of the week in order."]},
    {"id": "double", "turns": ["Write a Python function that doubles a number."]},
    {"id": "colours", "turns": ["List the colours of the rainbow."]},
]


@contextmanager
def fresh_host(scratch: Path, target: Path, number: int) -> Iterator[SystemdHost]:
    from ddtree.demo import drafter_folder

    scratch.mkdir()
    mounts = {target: "/opt/models/target", drafter_folder(): "/opt/models/drafter"}
    running = systemd_host(scratch, mounts, os.getpid() + number)
    try:
        host = running.__enter__()
    except NoSuchHost as reason:
        print(f"\nNO SYSTEMD HOST, SO KITS ARE NOT TESTED END TO END: {reason}", file=sys.__stderr__, flush=True)
        pytest.skip(f"no systemd host: {reason}")
    try:
        yield host
    finally:
        running.__exit__(None, None, None)


def work_folder(folder: Path, host: SystemdHost) -> Path:
    """What a person has at hand who deploys: relative paths only."""
    folder.mkdir()
    shutil.copy(host.key, folder / "key")
    shutil.copy(host.known_hosts, folder / "known_hosts")
    (folder / "api_key").write_text(f"{KEY}\n")
    (folder / "deployment.toml").write_text(DEPLOYMENT.replace("ADDRESS", host.address).lstrip())
    (folder / "sweep.toml").write_text(SWEEP.lstrip())
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return folder


def run(folder: Path, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "ddtree", *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=900
    )
    assert not check or done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    return done


def test_from_one_host_to_another(tmp_path: Path, target_folder: Path) -> None:
    with fresh_host(tmp_path / "one", target_folder, 7) as host:
        here = work_folder(tmp_path / "here", host)
        run(here, "sweep", "sweep.toml", "--out", "sweep")
        run(here, "deploy", "apply", "deployment.toml")  # the sweep left the budget that was best
        words = ("--results", "sweep", "--extra", "sweep.toml", "--extra", "prompts.jsonl", "--no-index")
        run(here, "kit", "create", "deployment.toml", "--out", "demo-pair", *words, *QUICK)
    kit = here / "demo-pair"
    assert check_folder(kit).is_whole
    record = read_record(KitRecord, kit / "data/kit.json")
    assert record.verdict == "proven" and len(record.experiments) == 2 and record.places[0].host == "ssh"
    process = read_record(ProcessRecord, kit / "data/process.json")
    assert process.arguments[1:4] == ["-m", "ddtree", "serve"] and process.as_rendered
    unit = (kit / "data/services/demo-pair.service.installed").read_text()
    assert unit == (kit / "data/services/demo-pair.service.rendered").read_text() and "[Service]" in unit
    assert "# /etc/systemd/system/demo-pair.service" in (kit / "data/services/demo-pair.service.effective").read_text()
    assert not [path for path in kit.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    subprocess.run(["sha256sum", "--quiet", "-c", bag.MANIFEST, bag.TAG_MANIFEST], cwd=kit, check=True)

    with fresh_host(tmp_path / "two", target_folder, 8) as other:
        there = work_folder(tmp_path / "there", other)
        ddtree("kit", "pack", kit, "--out", there / "demo-pair.zip")
        elsewhere = [f'host.{name}="{value}"' for name, value in _host_of(other).items()]
        changes = [word for each in ('host.kind="ssh"', *elsewhere) for word in ("--set", each)]
        planned = run(there, "kit", "restore", "demo-pair.zip", *changes, "--plan", "--json")
        steps = {step["name"]: step["state"] for step in json.loads(planned.stdout)["steps"]}
        assert steps["service"] == "to do" and steps["model"] == steps["drafter"] == "done", planned.stdout
        assert "demo-pair" not in other.ssh("ls /etc/systemd/system"), "a plan changes nothing"
        told = json.loads(run(there, "kit", "restore", "demo-pair.zip", *changes, *QUICK, "--json").stdout)
        assert told["as_sealed"] and told["verdict"]["verdict"] == "proven", told
        assert told["canary"]["is_within"] and told["canary"]["tau_now"]["value"] > 2
        assert other.ssh("systemctl is-active demo-pair").strip() == "active"
        assert KEY not in other.ssh("systemctl cat demo-pair; systemctl show demo-pair")


def _host_of(host: SystemdHost) -> dict[str, str]:
    return {"address": host.address, "user": "deploy", "identity_file": "key", "known_hosts_file": "known_hosts"}
