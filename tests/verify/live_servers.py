"""Real server processes, some with a fault built in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

from tiny_models import ALPHABET, SPECIAL_TOKENS

VOCAB = len(SPECIAL_TOKENS) + len(ALPHABET)
CONTEXT = 1536
DRAFTS = ("--budget", str(VOCAB), "--top-k-cap", str(VOCAB))
"""With one drafted position and a node for every token, even random weights are always right: tau is 2."""

FAULTY = Path(__file__).with_name("faulty_server.py")


class ServerProcess:
    """`ddtree serve` as a process of its own, on a port of its own; killed when left.

    Args:
        fault: a fault of `faulty_server.py` to build in.
    """

    def __init__(self, model: Path, draft: Path, *arguments: str, fault: str | None = None, port: int = 0) -> None:
        program = [sys.executable, "-m", "ddtree"] if fault is None else [sys.executable, str(FAULTY), fault]
        command = [*program, "serve", "--model", str(model), "--draft", str(draft), "--port", str(port)]
        command += [
            "--dtype",
            "float32",
            "--device",
            "cpu",
            "--threads",
            "1",
            "--served-model-name",
            "tiny",
            *arguments,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr
        self._lines += (line.strip() for line in iter(self._process.stderr.readline, ""))

    @property
    def url(self) -> str:
        """Its address, once it is ready."""
        deadline = time.monotonic() + 120
        while True:
            assert self._process.poll() is None and time.monotonic() < deadline, self._lines
            found = [re.search(r"http://\S+", line) for line in list(self._lines) if "listening on" in line]
            if found and found[0] and _is_ready(found[0][0]):
                return found[0][0]
            time.sleep(0.05)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(5)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
