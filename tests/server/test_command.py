"""`ddtree serve` as a process: what it says, what it refuses, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from ddtree.errors import UserError
from ddtree.server import ServerSettings, api_key, read_api_keys


class Process:
    """`ddtree serve` with the tiny pair; its lines of stderr as they come."""

    def __init__(self, folders: tuple[Path, Path], *arguments: str) -> None:
        target, drafter = folders
        command = [sys.executable, "-m", "ddtree", "serve", "--model", target, "--draft", drafter, "--port", "0"]
        command += ["--dtype", "float32", "--device", "cpu", "--budget", "8", *arguments]
        self.process = subprocess.Popen(
            [str(part) for part in command], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr
        self.lines += (line.strip() for line in iter(self.process.stderr.readline, ""))

    def wait_for(self, words: str) -> str:
        deadline = time.monotonic() + 60
        while True:
            for line in list(self.lines):
                if words in line:
                    return line
            assert self.process.poll() is None and time.monotonic() < deadline, self.lines
            time.sleep(0.02)

    @property
    def url(self) -> str:
        found = re.search(r"http://\S+", self.wait_for("listening on"))
        assert found
        return found[0]


@pytest.fixture
def start(tiny_folders):
    started: list[Process] = []

    def begin(*arguments: str) -> Process:
        started.append(Process(tiny_folders, *arguments))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.wait()


def stream(url: str, got: list[str], tokens: int = 200) -> threading.Thread:
    def read() -> None:
        body = {"prompt": "abc", "max_tokens": tokens, "stream": True, "n": 4, "ddtree": {"mode": "ar"}}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            got.append(str(response.status_code))
            got.extend(line for line in response.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_sigterm_lets_running_answers_end_and_exits_0(start):
    server = start()
    server.wait_for("ready")
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "tiny"
    facts = httpx.get(f"{server.url}/server_info").json()
    assert facts["requested"]["engine"]["budget"] == "8" and facts["effective"]["engine"]["budget"] == 8
    got: list[str] = []
    reading = stream(server.url, got)
    while len(got) < 3:
        time.sleep(0.005)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("ending: 4 answers get up to 30 s")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url}/health")
    reading.join(30)
    assert got[0] == "200" and got[-1] == "data: [DONE]"
    assert server.process.wait(20) == 0
    assert "Traceback" not in "\n".join(server.lines)


def test_sigterm_with_no_time_left_says_so_to_the_clients(start):
    server = start("--drain-timeout", "0")
    server.wait_for("ready")
    got: list[str] = []
    reading = stream(server.url, got)
    while len(got) < 3:
        time.sleep(0.005)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    reading.join(20)
    assert '"code":"shutting_down"' in got[-1]
    assert server.process.wait(20) == 0
    assert time.monotonic() - began < 5


def test_sigterm_under_load_loses_no_answer(start):
    """Some run and some wait when it comes; all are answered to their ends, and nobody new gets in."""
    server = start("--max-batch", "2", "--max-queue", "20")
    server.wait_for("ready")
    answers: list[list[str]] = [[] for _ in range(5)]
    readers = [stream(server.url, got, tokens=40) for got in answers]  # four answers each: most of them wait
    while not all(answers):
        time.sleep(0.005)
    server.process.send_signal(signal.SIGTERM)
    for reader in readers:
        reader.join(60)
    assert server.process.wait(20) == 0
    for got in answers:
        assert got[0] == "200" and got[-1] == "data: [DONE]"
        assert sum('"finish_reason":"length"' in line for line in got) == 4


def test_kill_9_in_the_middle_of_an_answer_and_a_restart(start):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    first = start("--port", port)
    first.wait_for("ready")
    body = {"prompt": "abc", "max_tokens": 200, "stream": True, "ddtree": {"mode": "ar"}}
    with (
        pytest.raises(httpx.TransportError),
        httpx.stream("POST", f"{first.url}/v1/completions", json=body, timeout=60) as response,
    ):
        for _ in response.iter_lines():
            first.process.kill()
    assert first.process.wait(20) == -signal.SIGKILL
    second = start("--port", port)
    second.wait_for("ready")
    assert httpx.get(f"{second.url}/ready").status_code == 200
    answer = httpx.post(f"{second.url}/v1/completions", json={"prompt": "abc", "max_tokens": 5}, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 5


def test_a_key_from_the_environment(tiny_folders, start, monkeypatch):
    monkeypatch.setenv("DDTREE_API_KEY", "a-long-enough-key")
    server = start()
    server.wait_for("ready")
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    key = {"Authorization": "Bearer a-long-enough-key"}
    assert httpx.get(f"{server.url}/v1/models", headers=key).status_code == 200
    assert "a-long-enough-key" not in httpx.get(f"{server.url}/server_info", headers=key).text


def test_an_address_that_is_taken(start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = start("--port", str(other.getsockname()[1]))
        assert server.process.wait(60) == 2
        assert "cannot listen on 127.0.0.1" in server.lines[-1]


def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_2(tiny_folders, tmp_path):
    server = Process((tmp_path, tiny_folders[1]))
    assert server.process.wait(60) == 2
    time.sleep(0.1)
    assert server.lines[-1].startswith("ddtree: ") and "Traceback" not in "\n".join(server.lines)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_public_addresses_want_a_key(host, tmp_path):
    with pytest.raises(UserError, match="there is no key: add --api-key-file FILE or --api-key KEY, or say --insecure"):
        ServerSettings(model_name="m", host=host)
    (tmp_path / "keys").write_text("a-long-enough-key\n")
    keys = read_api_keys(tmp_path / "keys")
    assert ServerSettings(model_name="m", host=host, api_keys=keys)
    assert ServerSettings(model_name="m", host=host, api_keys=api_key("a-long-enough-key"))
    assert ServerSettings(model_name="m", host=host, insecure=True)
    with pytest.raises(UserError, match="--insecure lets everybody in, and there is a key"):
        ServerSettings(model_name="m", host=host, api_keys=keys, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_this_machine_needs_no_key(host):
    assert ServerSettings(model_name="m", host=host)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no key"),
        (b"# none\n\n", "holds no key"),
        (b"short\n", "shorter"),
        (b"\xff\xfe\n", "not UTF-8"),
        (b"two words here\n", "holds blanks"),
        ("schlüsselwort\n".encode(), "beyond ASCII"),
    ],
)
def test_key_files_that_are_none(tmp_path, content, words):
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_api_keys(tmp_path / "keys")
    with pytest.raises(UserError, match="cannot read the key file"):
        read_api_keys(tmp_path / "none")


@pytest.mark.parametrize(
    "settings",
    [{"port": 70000}, {"port": -1}, {"queue_timeout_s": 0}, {"request_timeout_s": float("nan")}, {"drain_s": -1},
     {"max_queue": -1}, {"model_name": ""}, {"model_name": " a"}],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range(settings):
    with pytest.raises(UserError):
        ServerSettings(**{"model_name": "m"} | settings)


def test_help_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from ddtree.cli.main import run; run(['serve', '--help'])"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "100"}
    )
    assert all(flag in told.stdout for flag in ("--api-key ", "--api-key-file", "--insecure", "DDTREE_API_KEY"))


def test_a_missing_extra_is_named():
    code = "import sys; sys.modules['fastapi'] = None; from ddtree.cli.main import run; sys.exit(run(['serve']))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert "ddtree serve needs ddtree[server]: pip install 'ddtree[server]'" in told.stderr.replace("\n", " ")
