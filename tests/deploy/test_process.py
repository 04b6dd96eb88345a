"""Deploying a process on this machine: applied, awaited, taken back, and never mixed up with another one."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from ddtree.deploy.apply import ApplyError, apply, history, open_site, rollback, stop
from ddtree.deploy.deployment import Deployment
from ddtree.deploy.difference import difference
from ddtree.deploy.host import HostError
from ddtree.deploy.progress import Progress
from ddtree.deploy.status import Status, look
from ddtree.errors import UserError

from .conftest import Make, processes_with


def status(deployment: Deployment) -> Status:
    with open_site(deployment) as site:
        return look(site)


def difference_of(deployment: Deployment) -> tuple[str, ...]:
    with open_site(deployment) as site:
        return difference(site).lines


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def test_it_is_applied_and_answers(make: Make, state_home: Path) -> None:
    seen: list[Progress] = []
    deployment = make()
    assert status(deployment).state.status == "absent"

    applied = apply(deployment, tell=seen.append, note="first")

    assert applied.ready.text == " Paris"
    assert applied.release.number == 1 and applied.release.state == "good" and applied.release.note == "first"
    assert applied.replaced is None
    stages = [one.stage for one in seen]
    assert stages[0].startswith("looking at") and stages[-1] == "answering"
    assert any(one.stage == "reading weights" and one.share == 0.5 for one in seen)
    now = status(deployment)
    assert now.is_up and now.state.identity == applied.release.identity
    assert difference_of(deployment) == ()
    environ = Path(f"/proc/{applied.ready.identity.pid}/environ").read_bytes()
    assert f"INVOCATION_ID={applied.ready.identity.invocation}".encode() in environ.split(b"\0")
    assert os.getsid(applied.ready.identity.pid) == applied.ready.identity.pid != os.getsid(0)


def test_another_apply_replaces_the_process(make: Make) -> None:
    first = apply(make())
    changed = make(budget=16)
    assert any(line.startswith("+") and "--budget 16" in line for line in difference_of(changed))

    second = apply(changed)

    assert second.replaced == first.release
    assert second.ready.identity != first.ready.identity and not is_alive(first.ready.identity.pid)
    command = Path(f"/proc/{second.ready.identity.pid}/cmdline").read_bytes().split(b"\0")
    assert command[command.index(b"--budget") + 1] == b"16"
    assert [one.state for one in history(changed)] == ["good", "good"]


def test_a_service_that_does_not_answer_is_taken_back(make: Make) -> None:
    good = make()
    first = apply(good)
    identities = {first.ready.identity}
    for number, (fault, words, tail) in enumerate(
        (
            ("die", "the process ended while", "out of memory, of all things"),
            ("hang", "no completion within 1 s", "engine starts"),
            ("slow", "no completion within 1 s", "engine starts"),
            ("refuse", "refuses a completion: 400 I do not feel like it", "engine starts"),
            ("babble", "is no completion", "engine starts"),
            ("mute", "holds no token", "engine starts"),
            ("impostor", "another process answers: it bears invocation another", "engine starts"),
        ),
        start=2,
    ):
        with pytest.raises(ApplyError) as caught:
            apply(make(fault, budget=9), timeout_s=1 if "within" in words else None)
        error = caught.value
        assert words in error.reason and tail in error.tail, (error.reason, error.tail)
        assert error.release.number == number and error.release.state == "failed"
        assert error.back_to is not None and error.back_to.number == 1 and error.back_trouble is None
        now = status(good)
        assert now.is_up and now.release is not None and now.release.identity == now.state.identity
        assert now.state.identity not in identities, "it was started anew"
        identities.add(now.state.identity)
    assert [one.state for one in history(good)] == ["good"] + ["failed"] * 7
    assert difference_of(good) == ()


def test_logs_do_nothing_to_the_terminal_that_shows_them(make: Make, tmp_path: Path) -> None:
    """Escapes, bells and characters that turn text around are written out."""
    from ddtree.cli.main import run

    bad = make("escapes")
    with pytest.raises(ApplyError) as caught:
        apply(bad)
    shown = ["\\x1b]0;owned\\x07\\x1b[2Jred", "\\x9b31m", "\\u202e turned"]
    assert all(word in caught.value.tail for word in shown)
    with open_site(bad) as site:
        (folder := Path(site.supervisor.state_folder)).mkdir(parents=True, exist_ok=True)
        (folder / "service.log").write_bytes(b"now \x1b[5m\xc2\x9b31m blinking\n")
        following = site.supervisor.follow()
        told = [site.supervisor.tail(5), next(following)]
        following.close()  # type: ignore[attr-defined]
    assert told == ["now \\x1b[5m\\x9b31m blinking\n", "now \\x1b[5m\\x9b31m blinking"]
    file = tmp_path / "a \x1b[31m.toml"
    assert run(["deploy", "logs", str(file)]) == 2


def test_nobody_else_can_answer_for_it(make: Make) -> None:
    """Another process takes the port while the new one starts, and keeps it: that is told, not hidden."""
    good = make()
    apply(good)
    bad = make("second")
    with open_site(bad) as site:
        folder = Path(site.supervisor.state_folder)
    try:
        with pytest.raises(ApplyError, match=r"another process listens on 127\.0\.0\.1") as caught:
            apply(bad)
    finally:
        logs = "".join(path.read_text() for path in folder.glob("service.log*"))
        os.kill(int(logs.split("the other one is ")[1].split()[0]), signal.SIGKILL)
    assert caught.value.back_trouble, "the good one could not have the port either"


def test_the_first_one_that_fails_is_taken_out(make: Make, state_home: Path) -> None:
    bad = make("die")
    with pytest.raises(ApplyError) as caught:
        apply(bad)
    assert caught.value.back_to is None
    assert status(bad).state.status == "absent"
    assert not processes_with(str(state_home))


def test_nothing_is_touched_where_it_cannot_run(make: Make, tmp_path: Path) -> None:
    good = make()
    first = apply(good)
    for changes, words in (
        ({"engine__executable": "/no/such/program"}, ["there is no program /no/such/program"]),
        ({"model__path": str(tmp_path)}, ["holds no config.json"]),
        ({"secrets__api_key": {"file": "nowhere"}}, ["cannot read the secret api_key"]),
        ({"service__log": "/no/such/folder/x.log"}, ["there is no folder /no/such/folder"]),
    ):
        with pytest.raises(UserError) as caught:
            apply(make(**changes))
        assert all(word in str(caught.value) for word in words), caught.value
        assert caught.value.remedy
    assert status(good).state.identity == first.ready.identity
    assert len(history(good)) == 1


def test_a_port_that_is_taken_is_refused(make: Make) -> None:
    deployment = make()
    code = f"import http.server as h; h.HTTPServer(('127.0.0.1', {deployment.service.port}), h.BaseHTTPRequestHandler)"
    with subprocess.Popen([sys.executable, "-c", f"{code}.serve_forever()"]) as other:
        try:
            deadline = time.monotonic() + 10
            with pytest.raises(HostError, match=r"another process .* listens on port"):
                while time.monotonic() < deadline:
                    time.sleep(0.3)
                    with open_site(deployment) as site:
                        if site.supervisor.listeners(deployment.service.port):
                            apply(deployment)
        finally:
            other.kill()
    assert history(deployment) == []


def test_only_one_apply_at_a_time(make: Make) -> None:
    slow = make("hang")
    failures: list[BaseException] = []

    def first() -> None:
        try:
            apply(slow, timeout_s=4)
        except ApplyError as error:
            failures.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    try:
        while not history(slow):
            time.sleep(0.05)
        for change in (lambda: apply(make()), lambda: stop(slow), lambda: rollback(slow)):
            with pytest.raises(HostError, match=r"is being changed by .*@"):
                change()
    finally:
        thread.join()
    assert len(failures) == 1
    assert apply(make()).release.number == 2


def test_an_apply_that_was_killed_holds_no_lock_and_is_told(make: Make, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("old-secret-key")
    good = make(secrets__api_key={"file": str(key)})
    first = apply(good)
    key.write_text("new-secret-key")
    slow = make("hang", secrets__api_key={"file": str(key)})
    file = tmp_path / "slow.json"
    file.write_text(json.dumps(slow.model_dump(mode="json", exclude_unset=True)))
    code = (
        "import json, sys; from ddtree.deploy import to_deployment; from ddtree.deploy.apply import apply; "
        "apply(to_deployment(json.load(open(sys.argv[1]))))"
    )
    killed = subprocess.Popen([sys.executable, "-c", code, str(file)], env=dict(os.environ))
    while not (seen := status(slow)).is_up or seen.state.identity == first.ready.identity:
        assert killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    killed.wait()

    seen = status(good)
    assert seen.broken_off is not None and seen.broken_off.number == 2
    assert seen.state.status == "running", "what was started is not stopped by the death of who started it"
    back = rollback(good)
    assert back.release.note == f"rollback to {first.release.number}"
    assert status(good).is_up and status(good).broken_off is None
    with open_site(good) as site:
        assert site.host.read(f"{site.supervisor.secrets_folder}/api_keys") == b"old-secret-key\n"


def test_a_look_while_the_service_is_stopped_and_started_finds_it_or_not(make: Make, state_home: Path) -> None:
    deployment = make()
    apply(deployment)
    record, away, ended = state_home / "stand-in/identity.json", state_home / "stand-in/away", threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            record.rename(away)
            away.rename(record)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        seen = {status(deployment).state.status for _ in range(30)}
    finally:
        ended.set()
        thread.join()
    assert seen <= {"running", "stopped"}


def test_rollback_goes_to_the_one_before(make: Make) -> None:
    first, second = make(budget=4), make(budget=5)
    with pytest.raises(UserError, match="no earlier good release"):
        rollback(first)
    apply(first)
    apply(second)
    rollback(second)
    assert difference_of(first) == ()
    rollback(second, to=2)
    assert difference_of(second) == ()
    with pytest.raises(UserError, match="no release 9"):
        rollback(second, to=9)
    assert [one.note for one in history(first)] == ["", "", "rollback to 1", "rollback to 2"]


def test_a_stopped_service_stays_stopped_when_an_apply_fails(make: Make) -> None:
    good = make()
    apply(good)
    assert stop(good).status == "stopped"
    with pytest.raises(ApplyError) as caught:
        apply(make("die"))
    assert caught.value.left_stopped
    assert status(good).state.status == "stopped"
    assert difference_of(good) == ()


def test_keys_are_files_only_and_old_ones_come_back(make: Make, state_home: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("first-secret-key\n")
    token = "a\"b\\c$d`e%f'g h"
    (tmp_path / "token").write_text(token)
    secrets = {"secrets__api_key": {"file": str(key)}, "secrets__env": {"HF_TOKEN": {"file": str(tmp_path / "token")}}}
    good = make(**secrets)
    first = apply(good)

    process = Path(f"/proc/{first.ready.identity.pid}")
    assert b"first-secret-key" not in (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
    assert f"HF_TOKEN={token}".encode() in (process / "environ").read_bytes().split(b"\0")
    holders = {}
    for path in state_home.rglob("*"):
        if path.is_file() and (b"first-secret-key" in path.read_bytes() or token.encode() in path.read_bytes()):
            holders[path.name] = stat.S_IMODE(path.stat().st_mode)
    assert holders == {"api_keys": 0o600}  # in the other one the token is quoted
    assert stat.S_IMODE((state_home / "stand-in" / "secrets" / "environment").stat().st_mode) == 0o600

    key.write_text("second-secret-key")
    with pytest.raises(ApplyError):
        apply(make("die", **secrets))
    with httpx.Client(base_url=f"http://127.0.0.1:{good.service.port}", trust_env=False) as client:
        body = {"model": "m", "prompt": "x"}
        for shown, expected in (("first-secret-key", 200), ("second-secret-key", 401)):
            answer = client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {shown}"})
            assert answer.status_code == expected, "a failed apply leaves the key as it was"
    apply(good)  # and a good one changes it
    assert not list(state_home.rglob("*.previous"))


def test_helpers_end_with_the_service(make: Make) -> None:
    deployment = make("orphan")
    applied = apply(deployment)
    (helper,) = [
        int(line.split()[1]) for line in Path(log_of(deployment)).read_text().splitlines() if line.startswith("helper")
    ]
    assert is_alive(helper)
    os.kill(applied.ready.identity.pid, signal.SIGKILL)
    time.sleep(0.2)
    assert status(deployment).state.status == "failed"
    assert is_alive(helper)
    stop(deployment)
    assert not is_alive(helper)


def log_of(deployment: Deployment) -> str:
    with open_site(deployment) as site:
        return f"{site.supervisor.state_folder}/service.log"


def test_a_number_that_was_given_again_is_not_taken_for_the_service(make: Make, state_home: Path) -> None:
    deployment = make()
    apply(deployment)
    stop(deployment)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
        try:
            record = {"pid": stranger.pid, "started": "0-0-0:1", "invocation": "x" * 32}
            (state_home / "stand-in" / "identity.json").write_text(json.dumps(record))
            assert status(deployment).state.status == "failed"
            stop(deployment)
            assert is_alive(stranger.pid)
        finally:
            stranger.kill()


def test_the_log_is_shown_and_followed(make: Make) -> None:
    deployment = make()
    apply(deployment)
    with open_site(deployment) as site:
        assert "engine starts with budget 8" in site.supervisor.tail(5)
        following = site.supervisor.follow()
        assert "engine starts" in next(following)
        following.close()  # type: ignore[attr-defined]
