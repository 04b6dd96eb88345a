"""What goes on around a verification: the command, gauges, the timer, the process behind an address."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import httpx
import pytest
from live_servers import DRAFTS, VOCAB

from ddtree.cli.main import run
from ddtree.errors import UserError
from ddtree.verify import Expectation, Finding, Status, Verdict, checked_url, from_deployment
from ddtree.verify.command_line import settings_of
from ddtree.verify.finding import overall, proven, unknown, violated
from ddtree.verify.gauges import Gauges
from ddtree.verify.host_process import HostProcess, listening_process, read_process
from ddtree.verify.probes.settings import hold_command, same, told
from ddtree.verify.timer import render_timer

QUICK = ("--probe-tokens", "12", "--long-tokens", "120", "--concurrency", "2", "--speed-tolerance", "0.1")


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddtree", "verify", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | environment,
    )


def test_the_command(server, tmp_path):
    textfile = tmp_path / "ddtree.prom"
    done = command(server.url, *QUICK, "--json", "--textfile", str(textfile))
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["verdict"], told["engine"], told["exit_code"]) == ("proven", "native", 0)
    assert {"probe", "status", "claim", "evidence", "remedy", "required"} == told["findings"][0].keys()
    assert f'ddtree_verify_verdict{{target="{server.url}"}} 0.0' in textfile.read_text()
    done = command(server.url, *QUICK, "--budget", "8")
    assert done.returncode == 1 and "VIOLATED" in done.stdout and "-> start the server with" in done.stdout


def test_a_deployment_declares_all(server, pair, tmp_path, capsys):
    file = tmp_path / "tiny.toml"
    port = server.url.rsplit(":", 1)[1]
    file.write_text(
        f"""
[engine]
kind = "native"
[model]
path = "{pair[0]}"
served_name = "tiny"
[drafter]
path = "{pair[1]}"
[speculation]
algorithm = "ddtree"
budget = {VOCAB}
topk_cap = {VOCAB}
block_size = 2
[runtime]
device = "cpu"
dtype = "float32"
[service]
name = "tiny"
supervisor = "process"
port = {port}
[expect]
tau_floor = 1.5
"""
    )
    done = command(str(file), *QUICK, "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    claims = {finding["claim"] for finding in told["findings"] if finding["status"] == "proven"}
    assert {"top-k cap is " + str(VOCAB), "draft window is not limited", f"model is {pair[0]}"} <= claims
    assert "a round commits at least 1.50 tokens (tau)" in claims
    file.write_text(file.read_text().replace("topk_cap = ", "draft_window = 64\ntopk_cap = "))
    done = command(str(file), *QUICK, "--json")
    broken = [f["claim"] for f in json.loads(done.stdout)["findings"] if f["status"] == "violated"]
    assert done.returncode == 1 and broken == ["draft window is 64"]
    assert run(["verify", str(file), "--budget", "3"]) == 2
    assert "beside a deployment file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ftp://x"], "is no address of a server"),
        (["http://x/path"], "has a path"),
        (["http://me:secret@x"], "holds a password"),
        (["nothing.toml"], "nothing.toml"),
        (["http://x", "--expect", "none", "--budget", "4"], "has no meaning with --expect none"),
        (["http://x", "--draft-window", "many"], "write a number of tokens, or all"),
        (["http://x", "--expect", "none", "--draft-temperature", "0.8"], "has no meaning with --expect none"),
        (["http://x", "--draft-temperature", "0.09"], "at least 0.1"),
        (["http://x", "--draft-temperature", "nan"], "is no plain number"),
        (["http://x", "--metrics-port", "0"], "add --watch"),
        (["http://x", "--new-baseline", "--no-baseline"], "contradict"),
        (["http://x", "--api-key-file", "/no/such"], "cannot read the key file"),
        (["http://x", "--log", "/no/such"], "cannot read the log"),
        (["http://x", "--render-timer", "--every", "often"], "write a time such as 10min"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments, told, capsys):
    assert run(["verify", *arguments]) == 2
    line = capsys.readouterr().err
    assert told in line and len(line.splitlines()) == 1 and "secret" not in line


def test_watching_serves_gauges(server):
    watch = subprocess.Popen(
        [sys.executable, "-m", "ddtree", "verify", server.url, *QUICK, "--watch", "60", "--metrics-port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert watch.stdout and watch.stderr
        line = next(line for line in iter(watch.stderr.readline, "") if "gauges at" in line)
        url = re.search(r"http://\S+", line)[0]
        assert ": proven: " in watch.stdout.readline()
        deadline = time.monotonic() + 10
        while "verdict{" not in (text := httpx.get(url, timeout=5).text):
            assert time.monotonic() < deadline
        assert f'ddtree_verify_verdict{{target="{server.url}"}} 0.0' in text
        assert re.search(r"ddtree_verify_tau\{.*\} [12]\.\d", text)
        assert f'ddtree_verify_claims{{probe="speculation",status="violated",target="{server.url}"}} 0.0' in text
        watch.send_signal(signal.SIGINT)
        assert watch.wait(10) == 130
    finally:
        watch.kill()
        watch.wait()


def test_gauges_forget_what_was_not_measured():
    gauges = Gauges()
    gauges.set(Verdict("u", "native", (proven("a", "x"),), 1.0, measured={"tau": 3.0}))
    gauges.set(Verdict("u", "native", (violated("b", "y", remedy="z"),), 1.0))
    value = gauges.registry.get_sample_value
    assert value("ddtree_verify_verdict", {"target": "u"}) == 1
    assert value("ddtree_verify_tau", {"target": "u"}) != value("ddtree_verify_tau", {"target": "u"})  # not a number
    assert value("ddtree_verify_claims", {"target": "u", "probe": "a", "status": "proven"}) is None
    assert value("ddtree_verify_last_proven_timestamp_seconds", {"target": "u"}) > 0


def test_the_timer(tmp_path):
    (tmp_path / "key").write_text("secret-key")
    done = command("http://10.0.0.1:8000", "--budget", "8", "--api-key-file", str(tmp_path / "key"), "--render-timer")
    assert done.returncode == 0, done.stderr
    pieces = re.split(r"^# /etc/systemd/system/(\S+)\n", done.stdout, flags=re.MULTILINE)[1:]
    units = dict(zip(pieces[::2], pieces[1::2], strict=True))
    assert set(units) == {"ddtree-verify-10.0.0.1-8000.service", "ddtree-verify-10.0.0.1-8000.timer"}
    service = units["ddtree-verify-10.0.0.1-8000.service"]
    assert f"{sys.executable} -m ddtree verify http://10.0.0.1:8000 --budget 8 --api-key-file %d/api-key" in service
    assert f"LoadCredential=api-key:{tmp_path}/key" in service and "secret-key" not in done.stdout
    assert "OnUnitInactiveSec=10min" in units["ddtree-verify-10.0.0.1-8000.timer"]
    if shutil.which("systemd-analyze"):
        for name, text in units.items():
            (tmp_path / name).write_text(text)
        checked = subprocess.run(
            ["systemd-analyze", "verify", *(str(tmp_path / name) for name in units)], capture_output=True, text=True
        )
        told = [line for line in checked.stderr.splitlines() if "ddtree-verify" in line]
        assert checked.returncode == 0 and not told, checked.stderr


DEPLOYMENT = """
engine = { kind = "native", venv = "/v" }
model = { demo = true }
speculation = { algorithm = "ddtree", budget = 8 }
runtime = { device = "cpu" }
service = { name = "x", supervisor = "process", port = 8021 }
"""


def test_the_timer_of_a_deployment_takes_its_key_as_a_credential(tmp_path, monkeypatch):
    """Its user can read neither the deployer's files nor his environment."""
    file, key = tmp_path / "x.toml", tmp_path / "key"
    key.write_text("a-secret-key")
    file.write_text(DEPLOYMENT + 'secrets.api_key = { file = "key" }\n')
    done = command(str(file), "--render-timer")
    assert done.returncode == 0, done.stderr
    assert f"LoadCredential=api-key:{key}\n" in done.stdout and "a-secret-key" not in done.stdout
    assert f"verify {file} --api-key-file %d/api-key" in done.stdout
    monkeypatch.setenv("KEY", "a-secret-key")
    file.write_text(DEPLOYMENT + 'secrets.api_key = { env = "KEY" }\n')
    done = command(str(file), "--render-timer")
    assert done.returncode == 2 and "KEY" in done.stderr and "--api-key-file" in done.stderr and not done.stdout
    given = command(str(file), "--render-timer", "--api-key-file", str(key))
    assert given.returncode == 0 and f"LoadCredential=api-key:{key}" in given.stdout
    file.write_text(DEPLOYMENT + 'host = { kind = "ssh", address = "far" }\n')
    done = command(str(file), "--render-timer")
    assert done.returncode == 2 and "no SSH keys" in done.stderr


def test_a_password_in_an_address_never_comes_into_a_unit():
    done = command("http://me:a-secret@10.0.0.1:8000", "--render-timer")
    assert done.returncode == 2 and "a-secret" not in done.stdout + done.stderr


def test_units_take_values_literally():
    units = render_timer("50% $x", ["/bin/a b", "100%", "$HOME", 'a"b'], every="1h", key_file=None)
    assert 'ExecStart="/bin/a b" 100%% "$$HOME" "a\\"b"' in units.service.replace('"100%%"', "100%%")
    assert "Verify 50%% $x" in units.service
    with pytest.raises(UserError):
        render_timer("a\nb", ["/x"], every="1h", key_file=None)


def test_the_listening_process_is_found_while_it_opens_and_closes_connections():
    """A file descriptor that vanishes during the look is not the process vanishing."""
    ended = threading.Event()

    def open_many():
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(open(os.devnull))
            return stack.pop_all()

    def churn():
        while not ended.is_set():
            open_many().close()

    with open_many() as lower_ones, socket.create_server(("127.0.0.1", 0)) as listener:
        lower_ones.close()  # what comes and goes stands before the listener in the list
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        threads = [threading.Thread(target=churn) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            found = [listening_process(url) for _ in range(100)]
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    assert {process.pid if process else None for process in found} == {os.getpid()}


def test_the_process_behind_an_address(server):
    found = listening_process(server.url)
    assert found is not None and "serve" in found.arguments and DRAFTS[1] in found.arguments
    assert found == read_process(found.pid) and "started" in found.identity
    assert listening_process("http://192.0.2.1:80") is None and listening_process("http://127.0.0.1:1") is None


def test_secrets_of_command_lines_are_not_told(tmp_path):
    folder = tmp_path / "77"
    folder.mkdir()
    words = ["vllm", "--api-key", "abc", "abd", "--hf-token=def", "--api-key-file", "/k", "--prefill-tokens", "1"]
    (folder / "cmdline").write_bytes("\0".join(words).encode() + b"\0")
    (folder / "stat").write_text("77 (a b) c) S 1 " + "0 " * 17 + "4242 0")
    assert read_process(77, tmp_path) == HostProcess(
        77, 4242, ("vllm", "--api-key", "***", "***", "--hf-token=***", "--api-key-file", "/k", "--prefill-tokens", "1")
    )


def test_a_service_that_runs_something_else_than_its_file(tmp_path):
    """Whatever stands in the file, known to the engine's pages or not, is on the command line of its service."""
    folder = tmp_path / "77"
    folder.mkdir()
    words = ["/v/bin/python", "/v/bin/ddtree", "serve", "--model", "/m", "--api-key", "abc", "--prefill-tokens", "64"]
    (folder / "cmdline").write_bytes("\0".join(words).encode() + b"\0")
    (folder / "stat").write_text("77 (a) S 1 " + "0 " * 17 + "4242 0")
    (folder / "cgroup").write_text("0::/system.slice/pair.service\n")
    process = read_process(77, tmp_path)
    assert process.unit == "pair.service"
    wanted = Expectation(unit="pair.service", command=tuple(words[2:]), origin="pair.toml")
    assert hold_command(process, wanted).status is Status.proven
    other = replace(wanted, command=("serve", "--model", "/m", "--api-key", "abc", "--prefill-tokens", "128"))
    finding = hold_command(process, other)
    assert finding.status is Status.violated and "128" in finding.evidence[0] and "64" in finding.evidence[1]
    assert "abc" not in "".join(finding.evidence) and "deploy diff" in finding.remedy
    (folder / "cgroup").write_text("0::/user.slice/user-0.slice/session-1.scope\n")
    assert read_process(77, tmp_path).unit is None


def test_settings_on_a_command_line():
    config = json.dumps({"method": "dflash", "model": "/d", "num_speculative_tokens": 7})
    words = [
        "vllm",
        "serve",
        "--speculative-config",
        config,
        "--max-model-len=4096",
        "--speculative-ddtree-draft-temperature",
        "0.8",
        "--enforce-eager",
        "--tp-size",
        "x",
    ]
    assert settings_of(words) == {
        "algorithm": "dflash", "budget": 7, "block_size": 8, "drafter": "/d", "context_length": 4096,
        "cuda_graphs": False, "draft_temperature": 0.8,
    }  # fmt: skip
    assert settings_of(["--budget", "--speculative-algorithm"]) == {"algorithm": ""}


@pytest.mark.parametrize(
    ("name", "wanted", "found", "alike"),
    [
        ("budget", 8, "8", True),
        ("budget", "auto", "auto", True),
        ("draft_window", None, None, True),
        ("draft_window", None, 2048, False),
        ("draft_temperature", 1.0, 1, True),
        ("draft_temperature", 1, 1.0, True),
        ("draft_temperature", 0.8, 0.800000011920929, True),  # as float32 holds it
        ("draft_temperature", 0.8, 0.81, False),
        ("draft_temperature", 0.8, None, False),
        ("draft_temperature", float("nan"), float("nan"), False),
        ("memory_fraction", 0.85, 0.85, True),
        ("memory_fraction", 0.85, 0.9, False),
        ("cuda_graphs", True, True, True),
        ("nvls", False, True, False),
        ("model", "moonshotai/Kimi-K2", "/cache/models--moonshotai--Kimi-K2/snapshots/abc", True),
        ("model", "/a/b/", "/a/b", True),
        ("model", "/a/b", "/a/c", False),
    ],
)
def test_spellings_of_a_setting(name, wanted, found, alike):
    assert same(name, wanted, found) is alike


def test_fractions_are_told_plainly():
    assert [told(each) for each in (0.8, 0.800000011920929, 0.1 + 0.2, 10.0)] == ["0.8", "0.8", "0.3", "10.0"]


def test_verdicts():
    fine, open_claim = proven("a", "x"), unknown("a", "y", is_required=False)
    assert overall((), False) is Status.unknown
    assert overall((fine, open_claim), False) is Status.proven and overall((fine, open_claim), True) is Status.unknown
    assert overall((fine, unknown("a", "z")), False) is Status.unknown
    assert overall((unknown("a", "z"), violated("a", "w", remedy="r")), False) is Status.violated
    assert Verdict("u", None, (Finding("a", Status.unknown, "x"),), 0).exit_code == 3


def test_addresses():
    assert checked_url("http://x:80/v1/") == "http://x" or checked_url("http://x:8000/v1") == "http://x:8000"


def test_expectations_of_the_examples():
    from pathlib import Path

    from ddtree.deploy.deployment import load_deployment

    folder = Path(__file__).parents[2] / "examples" / "deployments"
    files = sorted(folder.glob("*.toml"))
    if not files:
        pytest.skip("there are no examples yet")
    for file in files:
        expectation = from_deployment(load_deployment(file), file.name)
        assert isinstance(expectation, Expectation) and expectation.settings and expectation.engine
