"""A server like the one being started, with another budget: whether it comes up, and how fast it is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from ddtree.sglang.settings import CONFIG_VARIABLE

CHILD_VARIABLE = "DDTREE_SGLANG_CHILD"
"""Set in such a server to the process that started it, so that it starts no further ones and ends with it."""

WAIT_S = 3600.0


class ChildServer:
    """Runs ``sglang.launch_server`` with the command line of this process and another budget; a context manager.

    Args:
        command_line: flags of this process.
        budget: of the child.
        config: what ``DDTREE_SGLANG_CONFIG`` says beside the budget.
        log: file for what it prints.
        dummy: random weights instead of the model's: enough to see whether graphs can be captured.
    """

    def __init__(
        self, command_line: list[str], budget: int, config: dict[str, object], log: Path, dummy: bool = False
    ) -> None:
        self.port = free_port()
        self.log = log
        self._command = [sys.executable, "-m", "sglang.launch_server", *command_line]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), "--speculative-ddtree-budget", str(budget)]
        self._command += ["--skip-server-warmup", *(["--load-format", "dummy"] if dummy else [])]
        self._environment = os.environ | {
            CHILD_VARIABLE: str(os.getpid()), CONFIG_VARIABLE: json.dumps(config | {"budget": budget}),
        }  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ChildServer:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its ranks and tokenizer too, and their GPU memory
        self._process.wait()

    def comes_up(self, wait_s: float = WAIT_S) -> bool:
        """Wait until it serves, or dies."""
        until = time.monotonic() + wait_s
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return True
            time.sleep(0.5)
        return False

    def last_words(self) -> str:
        """The line of its log that most likely says why it died."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if "Error" in line or "error" in line]
        return (told or lines or ["it printed nothing"])[-1][:300]


def end_with_starter() -> None:
    """In such a server: end when the process that started it is gone, as after a SIGKILL."""
    starter = int(os.environ.get(CHILD_VARIABLE) or 0)
    if not starter:
        return

    def watch() -> None:
        while True:
            try:
                os.kill(starter, 0)
            except ProcessLookupError:
                os._exit(1)
            except PermissionError:
                return
            time.sleep(1)

    threading.Thread(target=watch, name="end-with-starter", daemon=True).start()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
