"""What a deployment renders to: units that mean what was meant, and secrets that are nowhere else."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddtree.deploy import load_deployment, to_deployment
from ddtree.deploy.listeners import Listener, find_listeners
from ddtree.deploy.local_host import LocalHost
from ddtree.deploy.render import render
from ddtree.deploy.secret_file import SecretFile
from ddtree.deploy.sections import Secret
from ddtree.deploy.unit_check import check_unit
from ddtree.errors import UserError

from .test_deployment import BASE, EXAMPLES, SGLANG, VLLM, changed

ODD = "tok\"en\\w$ith`all%n sorts' of;# it"


def settings(unit: str, name: str) -> list[str]:
    return [line.split("=", 1)[1] for line in unit.splitlines() if line.startswith(f"{name}=")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_render_the_same_each_time_and_systemd_takes_them(path: Path) -> None:
    rendered = render(load_deployment(path))
    assert rendered == render(load_deployment(path)) and rendered.digest == render(load_deployment(path)).digest
    if rendered.unit is None or rendered.unit_name is None:
        return
    check = check_unit(LocalHost("none"), rendered.unit_name, rendered.unit, is_its_host=False)
    if shutil.which("systemd-analyze") is None:
        assert check.unchecked
        pytest.skip("systemd-analyze is not on this machine: units are not checked")
    assert check.complaints == () and check.unchecked is None


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
def test_systemd_finds_what_is_wrong() -> None:
    rendered = render(to_deployment(changed(BASE, {"engine.venv": "/v"})))
    assert rendered.unit and rendered.unit_name
    host = LocalHost("none")
    here = check_unit(host, rendered.unit_name, rendered.unit, is_its_host=True).complaints
    assert any("/v/bin/ddtree is not executable" in one for one in here)
    assert check_unit(host, rendered.unit_name, rendered.unit, is_its_host=False).complaints == ()
    odd = render(to_deployment(changed(BASE, {"engine.executable": "/a b/$HOME %n"})))
    assert odd.unit and odd.unit_name
    (complaint,) = check_unit(host, odd.unit_name, odd.unit, is_its_host=True).complaints
    assert "Command /a b/$HOME %n is not executable" in complaint
    broken = rendered.unit.replace("PrivateTmp=", "PrivateTemp=")
    assert "PrivateTemp" in str(check_unit(host, rendered.unit_name, broken, is_its_host=False).complaints)


def test_words_of_the_unit_are_what_was_written() -> None:
    data = changed(
        BASE,
        {
            "engine.venv": "/v",
            "model": {"path": "/mo dels/%n $HOME 'x' \"y\"\\z", "served_name": "n"},
            "runtime.env": {"A": "b c%d$e\"f'g\\h", "EMPTY_LIKE": "''"},
            "service.read_write_paths": ["/a b/%x"],
            "service.log": "/var/log/100%.log",
            "service.description": "100% of ${it}",
        },
    )
    unit = render(to_deployment(data)).unit
    assert unit
    (start,) = settings(unit, "ExecStart")
    assert start.startswith(":/v/bin/ddtree serve --model ")  # the colon: no variables
    assert r'"/mo dels/%%n $HOME ' + r"'x'" + r' \"y\"\\z"' in start
    assert r'"A=b c%%d$e\"f' + r"'g\\h" + '"' in settings(unit, "Environment")
    assert settings(unit, "ReadWritePaths") == ['"/a b/%%x"']
    assert settings(unit, "StandardOutput") == ["append:/var/log/100%%.log"]
    assert settings(unit, "Description") == ["100%% of ${it}"]


def test_the_unit_follows_the_file() -> None:
    base = changed(BASE, {"engine.venv": "/v"})
    plain = render(to_deployment(base)).unit or ""
    assert settings(plain, "DynamicUser") == ["yes"] and settings(plain, "Restart") == ["on-failure"]
    assert settings(plain, "PrivateDevices") == [], "the GPUs are devices"
    assert all(one.startswith("-+/usr/bin/nvidia-") for one in settings(plain, "ExecStartPre"))
    on_cpu = render(to_deployment(changed(base, {"runtime.device": "cpu"}))).unit or ""
    assert settings(on_cpu, "PrivateDevices") == ["yes"] and settings(on_cpu, "ExecStartPre") == []
    for key, value, name, told in (
        ("user", "llm", "User", "llm"),
        ("restart", "always", "Restart", "always"),
        ("restart_delay_s", 2.5, "RestartSec", "2.5"),
        ("max_restarts", 3, "StartLimitBurst", "3"),
        ("stop_timeout_s", 7, "TimeoutStopSec", "7"),
        ("memory_max_gib", 1.5, "MemoryMax", str(3 * 2**29)),
        ("cpu_quota_percent", 150, "CPUQuota", "150%"),
        ("open_files", 4096, "LimitNOFILE", "4096"),
        ("tasks_max", 99, "TasksMax", "99"),
    ):
        unit = render(to_deployment(changed(base, {f"service.{key}": value}))).unit or ""
        assert settings(unit, name) == [told], key
    assert "[Install]" not in (render(to_deployment(changed(base, {"service.enabled": False}))).unit or "")


@pytest.mark.parametrize(
    ("base", "form"), [(BASE, "keys"), (SGLANG, "sglang_yaml"), (VLLM, "systemd_environment")], ids=str
)
def test_a_key_is_in_one_file_only(
    base: dict[str, Any], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "k" * 20)
    changes: dict[str, Any] = {"engine.venv": "/v", "secrets.api_key": {"env": "THE_KEY"}, "service.address": "0.0.0.0"}
    if base is SGLANG:
        changes["service.allow_key_in_log"] = True
    for supervisor in ("systemd", "process"):
        rendered = render(to_deployment(changed(base, {**changes, "service.supervisor": supervisor})))
        (file,) = rendered.secret_files
        assert file.form.split("_")[-1] == form.split("_")[-1]
        content = file.content()
        assert b"k" * 20 in content and file.key_in(content) == "k" * 20
        assert "k" * 20 not in json.dumps([rendered.command, dict(rendered.environment), rendered.unit])


@pytest.mark.parametrize("form", ["keys", "sglang_yaml", "systemd_environment", "shell_environment"])
def test_odd_secrets_are_written_so_that_they_are_read_back(
    form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "".join(character for character in ODD if character.isascii() and character != " ")
    monkeypatch.setenv("ODD", ODD)
    monkeypatch.setenv("ODD_KEY", key)
    file = SecretFile("f", form, {"A_KEY": Secret(env="ODD_KEY")}, "A_KEY")
    assert file.key_in(file.content()) == key
    if form == "shell_environment":
        file = SecretFile("f", form, {"A_KEY": Secret(env="ODD")})
        (tmp_path / "f").write_bytes(file.content())
        script = f'. {shlex.quote(str(tmp_path / "f"))}; printf %s "$A_KEY"'
        assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == ODD


@pytest.mark.parametrize("key", ["with blank", "schl\u00fcssel", "#remark"])
def test_keys_that_no_client_can_show_are_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K", key)
    with pytest.raises(UserError, match="no key that clients can show") as caught:
        SecretFile("f", "keys", {"api_key": Secret(env="K")}, "api_key").content()
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot read"), (b"", "is empty"), (b" \n", "is empty"), (b"a\nb", "not one line"), (b"\xff", "not UTF-8")],
)
def test_secrets_that_are_none_are_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        SecretFile("f", "keys", {"api_key": Secret(file=str(path))}, "api_key").content()
    assert "api_key" in str(caught.value) and caught.value.remedy
    with pytest.raises(UserError, match=r"UNSET_VARIABLE.*is not set"):
        SecretFile("f", "keys", {"api_key": Secret(env="UNSET_VARIABLE")}).content()


@pytest.mark.parametrize(
    ("own", "wanted", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("::", "127.0.0.1", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("10.0.0.1", "127.0.0.1", False),
        ("::1", "127.0.0.1", False),
        ("10.0.0.1", "localhost", True),
    ],
)
def test_who_could_take_a_connection(own: str, wanted: str, expected: bool) -> None:
    assert Listener(own, False).serves(wanted) is expected


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0"])
def test_listeners_are_seen_with_their_owner(address: str) -> None:
    import os
    import socket

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as taken:
        port = taken.getsockname()[1]
        for pids, ours in (((os.getpid(),), True), ((1,), False), ((), False)):
            found = find_listeners(LocalHost("none"), port, pids, privileged=False)
            assert found == (Listener(address, ours),)
    assert find_listeners(LocalHost("none"), port, (os.getpid(),), privileged=False) == ()


def test_files_arrive_whole_or_not_at_all(tmp_path: Path) -> None:
    host, path = LocalHost("none"), tmp_path / "a b" / "f'$x"
    content = bytes(range(256)) * 100
    host.write(str(path), content, mode=0o640)
    assert host.read(str(path)) == content and path.stat().st_mode & 0o777 == 0o640
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert host.read(str(tmp_path / "none")) is None
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        host.write(str(tmp_path / "file" / "x"), b"")
    with pytest.raises(UserError, match="cannot read"):
        host.read(str(tmp_path))
