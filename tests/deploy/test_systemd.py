"""The demo's pair on a real systemd host, over SSH, from the first apply to the host's reboot.

The host boots once; the tests run in their order, and each leaves a good release running.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ddtree.deploy import Deployment, to_deployment
from ddtree.deploy.apply import Applied, ApplyError, apply, history, open_site, stop
from ddtree.deploy.difference import difference
from ddtree.deploy.host import HostError
from ddtree.deploy.open_host import open_host
from ddtree.deploy.progress import Progress
from ddtree.deploy.render import render
from ddtree.deploy.status import Status, look
from ddtree.deploy.unit_check import check_unit
from ddtree.errors import UserError

from .conftest import to_toml
from .systemd_host import SystemdHost

pytestmark = pytest.mark.timeout(900)  # the host's image may have to be built first

NAME = "pair"
PORT = 8123
UNIT = f"/etc/systemd/system/{NAME}.service"
KEY = "a-key-that-nobody-guesses"
TOKEN = "tok\"en\\w$ith`all%n sorts' of;# it"
WAYS = {"root": ("root", "root"), "sudo": ("deploy", "sudo")}


@dataclass
class Place:
    """A host, and how this file deploys to it."""

    host: SystemdHost
    folder: Path

    def deployment(self, *, way: str = "sudo", budget: int = 16, **changes: Any) -> Deployment:
        user, privilege = WAYS[way]
        data: dict[str, Any] = {
            "engine": {"kind": "native", "venv": "/opt/ddtree"},
            "model": {"path": "/opt/models/target", "served_name": "pair"},
            "drafter": {"path": "/opt/models/drafter"},
            "speculation": {"algorithm": "ddtree", "budget": budget},
            "runtime": {"device": "cpu", "threads": 1, "context_length": 512, "max_running_requests": 1},
            "service": {"name": NAME, "port": PORT, "address": "0.0.0.0", "ready_timeout_s": 300},
            "secrets": {"api_key": {"file": str(self.folder / "api_key")}, "env": {"HF_TOKEN": {"file": "token"}}},
            "host": {
                "kind": "ssh",
                "address": self.host.address,
                "user": user,
                "identity_file": str(self.host.key),
                "known_hosts_file": str(self.host.known_hosts),
                "privilege": privilege,
            },
        }
        for dotted, value in changes.items():
            section, key = dotted.split("__")
            data[section] = data[section] | {key: value}
        return to_deployment(data, folder=self.folder)

    def complete(self, base_url: str | None = None) -> dict[str, Any]:
        """A completion from this machine, over the network."""
        body = {"model": "pair", "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
        answer = httpx.post(
            f"{base_url or f'http://{self.host.address}:{PORT}'}/v1/completions",
            json=body,
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=60,
            trust_env=False,
        )
        answer.raise_for_status()
        told: dict[str, Any] = answer.json()
        return told


@pytest.fixture(scope="module")
def place(host: SystemdHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("deployment")
    (folder / "api_key").write_text(f"{KEY}\n")
    (folder / "token").write_text(TOKEN)
    here = Place(host, folder)
    yield here
    host.ssh(f"systemctl disable --now {NAME}.service 2>/dev/null; rm -rf {UNIT} /etc/ddtree /var/lib/ddtree; true")


@pytest.fixture(scope="module")
def first(place: Place) -> Applied:
    """The first release, deployed by a user with sudo."""
    seen: list[Progress] = []
    applied = apply(place.deployment(), tell=seen.append)
    stages = {one.stage for one in seen}
    assert "answering" in stages and stages & {"reading the configuration", "loading the model", "warming up"}, stages
    return applied


def status(deployment: Deployment) -> Status:
    with open_site(deployment) as site:
        return look(site)


def verified(place: Place, **changes: Any) -> tuple[int, list[str]]:
    """Exit code of `ddtree verify` with the deployment file, through SSH, and what of the declared was not proven."""
    file = place.folder / "verified.toml"
    file.write_text(to_toml(place.deployment(**changes).model_dump(mode="json", exclude_unset=True)))
    few = ["--probe-tokens", "24", "--long-tokens", "128", "--concurrency", "1", "--no-baseline", "--timeout", "200"]
    command = [sys.executable, "-m", "ddtree", "verify", str(file), "--json", *few]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    findings = json.loads(done.stdout)["findings"] if done.stdout else [done.stderr]
    return done.returncode, [one["claim"] for one in findings if one["status"] != "proven" and one["required"]]


def test_an_unknown_host_key_is_refused(place: Place, tmp_path: Path) -> None:
    nobody, changed = tmp_path / "nobody", tmp_path / "changed"
    nobody.write_text("")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    changed.write_text(f"{place.host.address} {(tmp_path / 'other.pub').read_text()}")
    with pytest.raises(HostError, match=r"is not known: .*compare the fingerprint"):
        apply(place.deployment(host__known_hosts_file=str(nobody)))
    with pytest.raises(HostError, match="another host key than the one that is known"):
        apply(place.deployment(host__known_hosts_file=str(changed)))
    assert nobody.read_text() == "", "nothing is learnt by being refused"


def test_rights_are_stated_or_refused(place: Place) -> None:
    with pytest.raises(HostError, match=r"not root: .*privilege"):
        apply(place.deployment(host__privilege="root"))
    with pytest.raises(HostError, match="sudo -n does not work"):
        apply(place.deployment(host__user="plain"))
    with pytest.raises(HostError, match="does not let us in"):
        apply(place.deployment(host__user="nobody-at-all"))
    with pytest.raises(HostError, match="cannot reach"):
        apply(place.deployment(host__port=2))
    assert history(place.deployment()) == []


def test_what_is_missing_on_the_host_is_told(place: Place) -> None:
    for changes, words in (
        ({"engine__venv": "/opt/none"}, "no program /opt/none/bin/ddtree"),
        ({"drafter__path": "/opt/none"}, "/opt/none holds no config.json"),
        ({"service__user": "nobody-at-all"}, "no user nobody-at-all"),
        ({"service__name": "ssh"}, "has a ssh.service of its own"),
        ({"service__port": 22}, "listens on port 22"),
    ):
        with pytest.raises(UserError, match=words):
            apply(place.deployment(**changes))


def test_the_unit_is_checked_by_the_hosts_own_systemd(place: Place) -> None:
    deployment = place.deployment(
        service__read_write_paths=["/var/log", "/opt/with blank"], runtime__env={"A": "b c%d$e\"f'g\\h"}
    )
    rendered = render(deployment)
    assert rendered.unit and rendered.unit_name
    with open_host(deployment) as host:
        assert check_unit(host, rendered.unit_name, rendered.unit, is_its_host=True).complaints == ()
        broken = rendered.unit.replace("RestartSec=", "RestatSec=").replace("NoNewPrivileges=yes", "NoNewPrivileges=x")
        complaints = check_unit(host, rendered.unit_name, broken, is_its_host=True).complaints
    assert any("RestatSec" in one for one in complaints) and any("boolean" in one for one in complaints)


def test_it_is_applied_and_answers_over_the_network(place: Place, first: Applied) -> None:
    assert first.release.state == "good" and first.replaced is None
    told = place.complete()
    assert told["choices"][0]["text"] and told["ddtree"]["mode"] == "tree" and told["ddtree"]["budget"] == 16
    seen = status(place.deployment())
    assert seen.is_up and seen.state.identity == first.ready.identity
    with open_host(place.deployment()) as host, host.reach("127.0.0.1", PORT) as base_url:
        assert place.complete(base_url)["choices"] == told["choices"], "the tunnel leads to the same service"
    with open_site(place.deployment()) as site:
        assert difference(site).lines == ()
        assert "ready" in site.supervisor.tail(20)
    assert verified(place) == (0, [])


def test_secrets_are_in_files_of_their_own_only(place: Place, first: Applied) -> None:
    ssh, pid = place.host.ssh, first.ready.identity.pid
    assert ssh(f"cat /etc/ddtree/{NAME}/api_keys") == f"{KEY}\n"
    assert ssh(f"stat -c '%a %U' /etc/ddtree/{NAME}/*").split("\n")[:2] == ["600 root", "600 root"]
    environ = ssh(f"cat /proc/{pid}/environ").split("\0")
    assert f"HF_TOKEN={TOKEN}" in environ, "systemd reads back what was written"
    for place_of_none in (
        f"cat {UNIT}",
        f"systemctl show {NAME}.service",
        f"tr '\\0' '\\n' </proc/{pid}/cmdline",
        f"journalctl -u {NAME}.service -o verbose",
        "journalctl -o cat -n 2000",
        f"find /var/lib/ddtree -type f -exec cat {{}} +; ls -R /var/cache/ddtree/{NAME}/",
    ):
        told = ssh(place_of_none)
        assert told and not [secret for secret in (KEY, TOKEN, "w$ith", "sorts' of") if secret in told], place_of_none
    assert KEY not in "".join(environ)
    assert ssh("stat -c %a /var/lib/ddtree/deploy/pair/releases/*/deployment.json").split() == ["600"]


def test_the_service_is_shut_in(place: Place, first: Applied) -> None:
    pid = first.ready.identity.pid
    lines = dict(
        line.split(":\t", 1) for line in place.host.ssh(f"cat /proc/{pid}/status").splitlines() if ":\t" in line
    )
    assert lines["NoNewPrivs"] == "1" and int(lines["CapEff"], 16) == 0 and lines["Seccomp"] == "2"
    assert lines["Uid"].split()[0] != "0"
    into = f"nsenter -t {pid} -m -- "
    for folder in ("/usr", "/etc", "~root", "/var/lib", "/opt/models"):
        with pytest.raises(subprocess.CalledProcessError):
            place.host.ssh(f"{into} touch {folder}/x")
    place.host.ssh(f"{into} touch /var/cache/ddtree/{NAME}/x")
    exposure = place.host.ssh(f"systemd-analyze security --no-pager {NAME}.service | tail -n 1")
    assert float(exposure.split(":")[1].split()[0]) < 3.5, exposure


def test_another_budget_is_another_process_though_the_line_breaks(place: Place, first: Applied) -> None:
    changed, host = place.deployment(budget=8), place.host
    with open_site(changed) as site:
        assert any(line.startswith("+ExecStart") and "--budget 8" in line for line in difference(site).lines)
    seen: list[Progress] = []
    outcome: list[Applied] = []
    thread = threading.Thread(target=lambda: outcome.append(apply(changed, note="budget 8", tell=seen.append)))
    thread.start()
    try:
        while not any(one.elapsed_s for one in seen):
            time.sleep(0.05)
        host.ssh("pkill -KILL -u deploy")  # what serves the connection, on the host
        while host.ssh(f"flock -n /var/lib/ddtree/deploy/{NAME}/lock echo free || true") == "free\n":
            time.sleep(0.2)
        with pytest.raises(HostError, match="is being changed by"):
            stop(place.deployment(way="root"))
    finally:
        thread.join()
    (second,) = outcome
    assert second.replaced is not None and second.replaced.number == first.release.number
    assert second.ready.identity != first.ready.identity
    assert place.complete()["ddtree"]["budget"] == 8
    assert verified(place, budget=8) == (0, [])
    code, broken = verified(place, budget=16)
    assert code == 1 and broken and all("16" in claim for claim in broken), broken


def test_two_at_once_and_a_broken_change(place: Place, first: Applied) -> None:
    """The change passes every check and breaks when the drafter is loaded; meanwhile nobody else gets in."""
    before = status(place.deployment())
    outcome: list[ApplyError] = []

    def break_it() -> None:
        try:
            apply(place.deployment(speculation__block_size=99))
        except ApplyError as error:
            outcome.append(error)

    thread = threading.Thread(target=break_it)
    thread.start()
    try:
        while history(place.deployment())[-1].state == "good":
            pass
        with pytest.raises(HostError, match=r"is being changed by \S+@\S+ since .* UTC"):
            apply(place.deployment(way="root"))
        with pytest.raises(HostError, match="is being changed by"):
            stop(place.deployment())
    finally:
        thread.join()
    (error,) = outcome
    assert "the process ended while" in error.reason
    assert "block_size 99 is out of range" in error.tail, error.tail
    assert error.back_trouble is None and error.back_to is not None and before.release is not None
    assert error.back_to.number == before.release.number
    after = status(place.deployment())
    assert after.is_up and after.state.identity not in (None, before.state.identity)
    assert after.release is not None and after.release.identity == after.state.identity
    assert place.complete()["ddtree"]["budget"] == 8, "the last good release runs again"
    assert place.host.ssh("ls /etc/ddtree/pair").split() == ["api_keys", "environment"]


def test_it_comes_back_when_the_host_does(place: Place, first: Applied) -> None:
    before = status(place.deployment()).state.identity
    place.host.reboot()
    deployment = place.deployment()
    with open_site(deployment) as site:
        while not look(site).is_up:
            assert site.supervisor.state().status in ("running", "starting")
        while httpx.get(f"http://{place.host.address}:{PORT}/ready", trust_env=False).status_code != 200:
            pass
        assert site.supervisor.state().identity != before
    assert place.complete()["ddtree"]["budget"] == 8


def test_foreign_changes_are_seen(place: Place, first: Applied) -> None:
    host = place.host
    host.ssh(
        f"mkdir -p {UNIT}.d && printf '[Service]\\nEnvironment=A=b\\n' >{UNIT}.d/x.conf && systemctl daemon-reload"
    )
    try:
        with pytest.raises(HostError, match=r"is changed by .*x\.conf: .*systemctl revert"):
            apply(place.deployment())
    finally:
        host.ssh(f"rm -r {UNIT}.d && systemctl daemon-reload")
    host.ssh(f"sed -i 's/^RestartSec=.*/RestartSec=77/' {UNIT}")
    with open_site(place.deployment()) as site:
        assert "-RestartSec=77" in difference(site).lines


def test_the_command_goes_back_and_shows_and_stops(place: Place, first: Applied) -> None:
    file = place.folder / "pair.toml"
    file.write_text(to_toml(place.deployment().model_dump(mode="json", exclude_unset=True)))

    def ddtree(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ddtree", "deploy", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    back = ddtree("rollback", str(file), "--to", str(first.release.number))
    assert back.returncode == 0, back.stderr
    assert "answers after" in back.stdout and "answering" in back.stderr
    assert place.complete()["ddtree"]["budget"] == 16
    seen = ddtree("status", str(file), "--json")
    assert seen.returncode == 0 and json.loads(seen.stdout)["is_up"]
    assert "running" in ddtree("status", str(file)).stdout
    listed = json.loads(ddtree("history", str(file), "--json").stdout)["releases"]
    assert [one["state"] for one in listed] == ["good", "good", "failed", "good"]
    assert "ready" in ddtree("logs", str(file), "-n", "30").stdout
    assert ddtree("diff", str(file)).returncode == 0
    here = place.deployment().model_dump(mode="json", exclude_unset=True) | {"host": {"kind": "local"}}
    (place.host.root / "root/local.toml").write_text(to_toml(here))
    assert "running" in place.host.ssh("/opt/ddtree/bin/ddtree deploy status local.toml"), "and as seen from the host"
    assert place.host.ssh("/opt/ddtree/bin/ddtree deploy diff local.toml") == ""
    stopped = ddtree("stop", str(file))
    assert (stopped.returncode, stopped.stdout) == (0, "stopped\n"), stopped
    assert ddtree("status", str(file)).returncode == 1


def test_a_process_over_ssh_needs_no_rights(place: Place, tmp_path: Path) -> None:
    """As in a rented container: no systemd used, no root; it outlives the connection."""
    engine = place.host.root / "opt/stand-in"
    python = f"/opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    (place.host.root / "opt/stand_in_engine.py").write_text((Path(__file__).parent / "stand_in_engine.py").read_text())
    engine.write_text(
        f'#!/bin/sh\nexport LD_LIBRARY_PATH=/opt/python/lib\nexec {python} /opt/stand_in_engine.py "$@"\n'
    )
    engine.chmod(0o755)
    data = place.deployment().model_dump(mode="json", exclude_unset=True)
    data["engine"] = {"kind": "native", "executable": "/opt/stand-in"}
    data["service"] = {"name": "plain", "supervisor": "process", "port": 8124, "ready_timeout_s": 60}
    data["host"] = data["host"] | {"user": "plain"}
    del data["host"]["privilege"]
    deployment = to_deployment(data, folder=place.folder)
    applied = apply(deployment)
    pid = applied.ready.identity.pid
    seen = status(deployment)
    assert seen.is_up and seen.state.identity == applied.ready.identity
    assert place.host.ssh(f"ps -o user= -p {pid} || stat -c %U /proc/{pid}").split() == ["plain"]
    listed = place.host.ssh("find /home/plain/.local/state/ddtree/plain -type f -perm /077", "plain")
    assert listed == "", "nobody else may read it"
    with pytest.raises(ApplyError, match="the process ended"):
        apply(to_deployment(data | {"runtime": data["runtime"] | {"env": {"FAULT": "die"}}}, folder=place.folder))
    assert status(deployment).is_up
    assert stop(deployment).status == "stopped"
    place.host.ssh(f"[ ! -e /proc/{pid} ]")
