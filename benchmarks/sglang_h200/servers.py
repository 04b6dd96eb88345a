"""SGLang servers of a benchmark: started together, waited for, asked, always ended."""

from __future__ import annotations

import contextlib
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

    def post(self, path: str, body: dict[str, Any], timeout: float = 60) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            answer: bytes = reply.read()
            return answer

    def generate(
        self, input_ids: list[int], timeout: float = 60, asked: dict[str, Any] | None = None, **sampling: Any
    ) -> Answer:
        """One request; ``asked`` are fields beside the sampling parameters."""
        body = {"input_ids": input_ids, "sampling_params": {"temperature": 0, "max_new_tokens": 256} | sampling}
        begun = time.perf_counter()
        found = json.loads(self.post("/generate", body | (asked or {}), timeout))
        return Answer(found.get("output_ids") or [], found["text"], time.perf_counter() - begun, found["meta_info"])

    def flush(self, wait_s: float = 10) -> bool:
        """Empty the prefix cache, which SGLang does only when nothing runs; whether it did."""
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            with contextlib.suppress(urllib.error.HTTPError):
                self.post("/flush_cache", {})
                return True
            time.sleep(0.2)
        return False

    def used_tokens(self) -> int:
        """K/V slots in use, cached prefixes not counted."""
        loads = json.loads(self.get("/v1/loads?include=core"))
        return int(sum(load["num_used_tokens"] for load in loads["loads"]))

    def answer_all(self, prompts: list[list[int]], concurrency: int, **sampling: Any) -> tuple[list[Answer], float]:
        """All prompts, ``concurrency`` at a time; answers in order, and seconds for all."""
        begun = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            answers = list(pool.map(lambda ids: self.generate(ids, **sampling), prompts))
        return answers, time.perf_counter() - begun

    def warm_up(self, prompts: list[list[int]]) -> None:
        """Run every batch size once, so that no timed pass compiles or loads anything."""
        for concurrency in (1, 4, 16):
            self.answer_all((prompts * 2)[: 2 * concurrency], concurrency, max_new_tokens=48)

    def stop(self) -> None:
        """End the server and all that it spawned, at once."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process = None

    def said(self) -> str:
        """Its log, so far."""
        return self.log.read_text(errors="replace") if self.log else ""

    def tail(self, lines: int = 40) -> str:
        """The end of the log, from the first traceback in it where there is one."""
        text = self.said().splitlines()
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
