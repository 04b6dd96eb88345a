"""SGLang servers of a benchmark: started together, waited for, asked, always ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any


@dataclass
class Answer:
    """One finished request: its tokens, seconds from sending to the end, and what SGLang says of it."""

    token_ids: list[int]
    text: str
    seconds: float
    meta: dict[str, Any]


@dataclass
class Server:
    """One server.

    Attributes:
        name: how tables call it.
        arguments: of ``sglang.launch_server``, port and log left out.
        extra_environment: on top of the common one.
    """

    name: str
    arguments: list[str]
    port: int
    extra_environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    ready_s: float | None = None

    def start(self, environment: dict[str, str], folder: Path) -> None:
        self.log = folder / f"{self.name}.log"
        command = [sys.executable, "-m", "sglang.launch_server", "--port", str(self.port)]
        command += ["--nccl-port", str(self.port + 50), *self.arguments]
        with self.log.open("wb") as out:
            out.write((" ".join(command) + "\n").encode())
            out.flush()
            self.process = subprocess.Popen(
                command, env=environment | self.extra_environment, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def get(self, path: str, timeout: float = 5) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout) as reply:
            body: bytes = reply.read()
            return body

    def is_ready(self) -> bool:
        try:
            self.get("/health", timeout=2)
        except OSError:
            return False
        return True

    def generate(self, input_ids: list[int], timeout: float = 60, **sampling: Any) -> Answer:
        body = {"input_ids": input_ids, "sampling_params": {"temperature": 0, "max_new_tokens": 256} | sampling}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        begun = time.perf_counter()
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            found = json.loads(reply.read())
        return Answer(found.get("output_ids") or [], found["text"], time.perf_counter() - begun, found["meta_info"])

    def answer_all(self, prompts: list[list[int]], concurrency: int, **sampling: Any) -> tuple[list[Answer], float]:
        """All prompts, ``concurrency`` at a time; answers in order, and seconds for all."""
        begun = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            answers = list(pool.map(lambda ids: self.generate(ids, **sampling), prompts))
        return answers, time.perf_counter() - begun

    def stop(self) -> None:
        if self.process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
            except ProcessLookupError:
                return
            try:
                self.process.wait(4)
            except subprocess.TimeoutExpired:
                continue
            if sign is signal.SIGTERM:
                time.sleep(0.5)

    def tail(self, lines: int = 40) -> str:
        """The end of the log, from the first traceback in it where there is one."""
        if self.log is None:
            return ""
        text = self.log.read_text(errors="replace").splitlines()
        first = next((i for i, line in enumerate(text) if "Traceback (most recent call last)" in line), None)
        if first is None:
            return "\n".join(line[:300] for line in text[-lines:])
        return "\n".join(line[:300] for line in text[max(first - 3, 0) : first + lines])


def figures(answers: list[Answer], seconds: float) -> dict[str, float]:
    """tok/s of one request (median) and of all together, tokens a verify pass, and how many answers."""
    tokens = [int(answer.meta["completion_tokens"]) for answer in answers]
    rounds = sum(int(answer.meta.get("spec_verify_ct") or 0) for answer in answers)
    return {
        "request_tok_s": round(median(t / a.seconds for t, a in zip(tokens, answers, strict=True)), 1),
        "total_tok_s": round(sum(tokens) / seconds, 1),
        "tau": round(sum(tokens) / rounds, 3) if rounds else 1.0,
        "tokens": sum(tokens),
    }
