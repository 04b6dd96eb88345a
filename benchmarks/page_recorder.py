"""Records every page and answer that `ddtree verify` reads of a live server, so that tests can replay them.

    python benchmarks/page_recorder.py http://127.0.0.1:30000 --engine sglang --out tests/verify/pages/NAME.json

Pages repeat: each content is kept once. Metrics are cut to the families that verify reads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from ddtree.verify import Expectation, Options, Verdict, Verification
from ddtree.verify.probes import answers

METRICS = (
    "sglang:spec_", "sglang:generation_tokens_total", "sglang:prompt_tokens_total", "sglang:cuda_graph_passes_total",
    "sglang:is_cuda_graph", "vllm:spec_decode_", "vllm:generation_tokens_total", "vllm:prompt_tokens_total",
    "process_start_time_seconds", "ddtree_rounds_total", "ddtree_completion_tokens_total", "ddtree_prompt_tokens_total",
)  # fmt: skip
PRIVATE = ("api_key", "admin_api_key", "host", "ssl_")
CHANGING = ("last_gen_throughput", "avg_spec_accept_length", "step_time_dict", "uptime_s")
"""Beginnings of keys of `/server_info`; the changing ones are never read, and would make every page another one."""

MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|Users|var/tmp)/[\w./+-]*")
"""What is left of the machine's own after the paths that are named."""

DRAWN: ContextVar[dict[str, list[Any]] | None] = ContextVar("DRAWN", default=None)
"""What the probe of answers draws anew in each run, by the name of what draws it: a replay must ask the same."""


def _told(name: str) -> None:
    draw = getattr(answers, name)

    def drawn() -> Any:
        value = draw()
        if (told := DRAWN.get()) is not None:
            told.setdefault(name, []).append(value)
        return value

    setattr(answers, name, drawn)


for each in ("_numbers", "most_tokens"):
    _told(each)


class Recorder:
    """What went through, in order."""

    def __init__(self) -> None:
        self.contents: dict[str, str] = {}
        self.steps: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def add(self, method: str, path: str, status: int, content: bytes) -> None:
        text = content.decode("utf-8", "replace")
        if path == "/metrics":
            text = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(METRICS))
        elif path in ("/server_info", "/get_server_info") and status == 200:
            text = json.dumps(_shortened(json.loads(text)))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        with self._lock:
            self.contents.setdefault(digest, text)
            self.steps.append({"method": method, "path": path, "status": status, "content": digest})


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: None if k.startswith(PRIVATE + CHANGING) else _shortened(v) for k, v in value.items()}
    return [_shortened(each) for each in value] if isinstance(value, list) else value


@contextmanager
def recording(url: str) -> Iterator[tuple[str, Recorder]]:
    """An address that hands everything on to ``url``, streams as they come."""
    recorder = Recorder()

    class Handler(BaseHTTPRequestHandler):
        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {n: v for n, v in self.headers.items() if n.lower() in ("content-type", "authorization")}
            try:
                with httpx.stream(self.command, url + self.path, content=body, headers=headers, timeout=600) as answer:
                    self.send_response(answer.status_code)
                    self.send_header("Content-Type", answer.headers.get("content-type", "application/json"))
                    self.send_header("Connection", "close")
                    self.end_headers()
                    whole = b""
                    for piece in answer.iter_bytes():
                        self.wfile.write(piece)
                        self.wfile.flush()
                        whole += piece
            except (httpx.HTTPError, OSError):
                self.close_connection = True
                return
            recorder.add(self.command, self.path, answer.status_code, whole)

        do_GET = do_POST = _pass

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", recorder
        finally:
            server.shutdown()
            thread.join()


def record(
    url: str, expectation: Expectation, options: Options, out: Path, note: str, renamed: Mapping[str, str]
) -> Verdict:
    """Verify through the recorder, and keep what was read beside the verdict.

    Args:
        renamed: paths of this machine, and what stands for them in the file.
    """
    drawn: dict[str, list[Any]] = {}
    DRAWN.set(drawn)
    with recording(url) as (between, recorder):
        verdict = Verification(between, expectation, options).run()
    DRAWN.set(None)
    kept = {
        "note": note,
        "engine": verdict.engine,
        "expectation": {k: dict(v) if k == "settings" else v for k, v in vars(expectation).items()},
        "options": {k: v for k, v in vars(options).items() if k != "log"},
        "verdict": verdict.status.value,
        "violated": sorted({f"{f.probe}: {f.claim}" for f in verdict.findings if f.status.value == "violated"}),
        "drawn": drawn,
        "steps": recorder.steps,
        "contents": recorder.contents,
    }
    text = json.dumps(kept, indent=0) + "\n"
    for path, name in sorted(renamed.items(), key=lambda pair: -len(pair[0])):
        text = text.replace(path, name)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(MACHINE_PATH.sub("(a path)", text))
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine")
    parser.add_argument("--expect-none", action="store_true")
    parser.add_argument("--declare", type=json.loads, default={}, help="settings as a JSON object")
    parser.add_argument("--graphs", choices=["on", "off"])
    parser.add_argument("--tau-floor", type=float)
    parser.add_argument("--probe-tokens", type=int, default=48)
    parser.add_argument("--long-tokens", type=int, default=1024)
    parser.add_argument("--rename", nargs=2, action="append", default=[], metavar=("PATH", "NAME"))
    parser.add_argument("--note", default="")
    given = parser.parse_args()
    expectation = Expectation(
        engine=given.engine,
        speculates="none" if given.expect_none else "yes",
        settings=given.declare,
        graphs=None if given.graphs is None else given.graphs == "on",
        **({} if given.tau_floor is None else {"tau_floor": given.tau_floor}),
    )
    options = Options(probe_tokens=given.probe_tokens, long_tokens=given.long_tokens, baseline=False)
    verdict = record(given.url.rstrip("/"), expectation, options, given.out, given.note, dict(given.rename))
    print(json.dumps(verdict.to_json(), indent=1))


if __name__ == "__main__":
    main()
