"""The operations wing on a GPU machine without network: pages for verify, sweeps, a kit, a peer, server load.

    python benchmarks/ops_h200.py prepare --stage STAGE --home HOME
    python benchmarks/ops_h200.py JOB --home HOME --out OUT --seconds N

The jobs run on the GPU that CUDA_VISIBLE_DEVICES names. Each works in steps: what a step found is on disk before the
next begins, one that fails or takes too long leaves the rest their time, and ``OUT/JOB/steps.json`` tells how each
ended. ``ops_h200.sh`` starts them in the background and packs what they found.

verify        real SGLang and native servers, right and wrong ones, held to declarations; pages for replay
sweep-native  the native engine's modes and budgets by concurrency, through the process supervisor, with its report
sweep-sglang  the same over SGLang without speculation, with DFLASH and with DDTREE; the recommended one is sealed in a
              kit, of an installation with an edited file
peer          the same load on the same server by ``ddtree bench`` and by SGLang's own client, in turns
load          ``server_load.py``: the server's own cost at batch 1, and a table by concurrency
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from ops_home import EDITED, ROOT, Home

BENCHMARKS = ROOT / "benchmarks"
STOP_S = 45.0
"""Kept back of a job's time, to end services that still run."""


class Job:
    """Steps of one job, each a program with a time limit.

    Args:
        port: the first of a range that no other job uses.
    """

    def __init__(self, name: str, given: argparse.Namespace, port: int) -> None:
        self.given, self.home, self.port = given, Home(given.home), port
        self.out: Path = given.out / name
        self.out.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + given.seconds - STOP_S
        self.steps: list[dict[str, Any]] = []
        self.services: list[Path] = []

    @cached_property
    def prompts(self) -> Path:
        """Maths and code in turn."""
        files = [self.home.prompts / f"{name}.jsonl" for name in ("gsm8k_test100", "humaneval")]
        pairs = zip(*(file.read_text(encoding="utf-8").splitlines() for file in files), strict=False)
        rows = [row for pair in pairs for row in pair][: self.given.prompts]
        return self.written("prompts.jsonl", "".join(f"{row}\n" for row in rows))

    def step(self, name: str, command: list[Any], seconds: float, variables: dict[str, str] | None = None) -> bool:
        """Run one program; whether it ended well and in time."""
        seconds = min(seconds, self.left_s)
        row: dict[str, Any] = {"step": name, "state": "no time left"}
        self.steps.append(row)
        if seconds < 5:
            return self._told(row)
        began = time.monotonic()
        with (self.out / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)], stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=self.home.environment() | (variables or {}), cwd=self.out,
            )  # fmt: skip
            try:
                code = process.wait(seconds)
                row["state"] = "done" if code == 0 else f"ended with {code}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGINT)  # Ctrl-C keeps what is done
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                row["state"] = "out of time"
        row["seconds"] = round(time.monotonic() - began, 1)
        return self._told(row)

    def _told(self, row: dict[str, Any]) -> bool:
        print(json.dumps(row), flush=True)
        if row["state"] != "done" and (log := self.out / f"{row['step']}.log").exists():
            print(log.read_text(errors="replace")[-3000:], flush=True)
        part = self.out / "steps.part"
        part.write_text(json.dumps(self.steps, indent=1) + "\n")
        part.replace(self.out / "steps.json")
        return bool(row["state"] == "done")

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def ddtree(self, name: str, *arguments: Any, seconds: float) -> bool:
        """One of ddtree's commands, in the job's folder: results tell the command, which should name no machine."""
        return self.step(name, ["-m", "ddtree", *arguments], seconds)

    def written(self, name: str, text: str) -> Path:
        place = self.out / name
        place.write_text(text)
        return place

    def end(self) -> bool:
        """Stop what was deployed; whether all steps ended well."""
        self.deadline += STOP_S
        for place, file in enumerate(self.services):
            self.ddtree(f"stop-{place}", "deploy", "stop", file, seconds=20)
        return all(row["state"] == "done" for row in self.steps)


def native_deployment(job: Job, algorithm: str = "ddtree", budget: int = 64) -> str:
    home = job.home
    variables = {"PYTHONPATH": home.environment()["PYTHONPATH"]}
    return f"""\
[engine]
kind = "native"

[model]
path = "{home.target}"
served_name = "smollm2-135m-instruct"

[drafter]
path = "{home.drafter}"

[speculation]
algorithm = "{algorithm}"
budget = {budget}

[runtime]
device = "{job.given.device}"
dtype = "{job.given.dtype}"
context_length = 2048
max_running_requests = 16
memory_fraction = 0.3
env = {toml_table(variables)}

[service]
name = "smollm2-native-{job.port}"
supervisor = "process"
port = {job.port}
ready_timeout_s = 240.0
stop_timeout_s = 15.0
"""


def sglang_deployment(job: Job, site: Path, budget: int = 32) -> str:
    """As `sglang_h200/ways.py` runs it: CUDA graphs for decoding, FlashAttention 3, PyTorch's sampling.

    On a CPU SGLang serves without speculation alone; that is for rehearsals.
    """
    home, is_gpu = job.home, job.given.device == "cuda"
    extra = ["--sampling-backend", "pytorch", "--disable-prefill-cuda-graph", "--max-total-tokens", "65536"]
    extra += ["--skip-server-warmup", "--sleep-on-idle", "--log-level", "info"]
    return f"""\
[engine]
kind = "sglang"
executable = "{sys.executable}"

[model]
path = "{home.target}"
served_name = "smollm2-135m-instruct"

[drafter]
path = "{home.drafter}"

[speculation]
algorithm = "ddtree"
budget = {budget}

[runtime]
device = "{job.given.device}"
dtype = "{job.given.dtype}"
attention_backend = "{"fa3" if is_gpu else "torch_native"}"
memory_fraction = 0.4
max_running_requests = 16
context_length = 4096
{"cuda_graph_sizes = [1, 2, 4, 8, 12, 16]" if is_gpu else ""}
extra_args = {json.dumps(extra)}
env = {toml_table(home.sglang_variables(site))}

[service]
name = "smollm2-sglang-{job.port}"
supervisor = "process"
port = {job.port}
ready_timeout_s = 150.0
stop_timeout_s = 15.0
"""


def toml_table(values: dict[str, str]) -> str:
    return "{ " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items()) + " }"


def sweep_file(job: Job, deployment: Path, name: str, points: list[dict[str, Any]], repeats: int) -> Path:
    """One block of points at three concurrencies."""
    rows = [", ".join(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in point.items()) for point in points]
    listed = "".join(f"  {{ {row} }},\n" for row in rows)
    return job.written(
        f"{name}-sweep.toml",
        f"""\
deployment = "{deployment.name}"

[bench]
workloads = ["maths-and-code={job.prompts.name}"]
concurrency = {json.dumps(job.given.concurrency)}
repeats = {job.given.repeats or repeats}
max_tokens = {job.given.max_tokens}
unique_prefix = true
{f"requests = {job.given.requests}" if job.given.requests else ""}

[verify]
probe_tokens = 24
concurrency = 4

[[sweep]]
name = "{name}"
points = [
{listed}]
""",
    )


ALGORITHM, BUDGET = "speculation.algorithm", "speculation.budget"
PLAIN = {ALGORITHM: "none"}


def sweep_native(job: Job) -> None:
    """One server, since modes and budgets go with each request; of a width first, for which verify can count nodes."""
    deployment = job.written("native.toml", native_deployment(job))
    job.services.append(deployment)
    points: list[dict[str, Any]] = [{BUDGET: 64}, PLAIN, {ALGORITHM: "dflash", BUDGET: 15}, {BUDGET: "auto"}]
    points += [{BUDGET: budget} for budget in (8, 16, 32, 128)]
    file = sweep_file(job, deployment, "native", points, 5)
    results = job.out / "results"
    resume = ["--resume"] if results.exists() else []
    job.ddtree("sweep", "sweep", file.name, "--out", results.name, "--no-restore", *resume, seconds=job.left_s - 45)
    job.ddtree("report", *report_of(job, results, "Native engine"), seconds=60)


def sweep_sglang(job: Job) -> None:
    """In the order in which points matter, should the time not suffice for all; then the kit of what is best."""
    deployment = job.written("sglang.toml", sglang_deployment(job, job.home.edited))
    job.services.append(deployment)
    points: list[dict[str, Any]] = [{BUDGET: 32}, PLAIN, {ALGORITHM: "dflash", BUDGET: "unset"}]
    points += [{BUDGET: budget} for budget in (64, 16, 8)]
    file = sweep_file(job, deployment, "sglang", points, 3)
    results = job.out / "results"
    resume = ["--resume"] if results.exists() else []
    job.ddtree("sweep", "sweep", file.name, "--out", results.name, *resume, seconds=job.left_s - 130)
    job.ddtree("report", *report_of(job, results, "SGLang"), seconds=60)
    sealed = results / "recommended.toml"
    if not sealed.exists():  # the time did not suffice for all points: the kit is of the first
        sealed = deployment
        job.ddtree("apply", "deploy", "apply", sealed, seconds=90)
    seal(job, sealed, results, [file, job.prompts])


def report_of(job: Job, results: Path, engine: str) -> list[Any]:
    title = f"{engine} with SmolLM2-135M-Instruct on {'one H200' if job.given.device == 'cuda' else 'a CPU'}"
    sizes = ["--target-gb", 0.27, "--drafter-gb", 0.095]
    return ["report", results, "--out", job.out / "report", "--title", title, *sizes]


def seal(job: Job, deployment: Path, results: Path, extras: list[Path]) -> None:
    """A kit of the live service, checked; the edited file must be in it, and no other.

    A service that is not proven is sealed all the same, once that is told: the kit says so, and what was found.
    """
    kit = job.out / "sglang-h200"
    create: list[Any] = ["kit", "create", deployment, "--out", kit, "--results", results, "--no-index"]
    create += ["--probe-tokens", 32, "--long-tokens", 1024]
    for extra in extras:
        create += ["--extra", extra]
    is_sealed = deployment.exists() and job.ddtree("kit-create", *create, seconds=120)
    if not is_sealed and not job.ddtree("kit-create-failing", *create, "--even-if-failing", seconds=120):
        return
    job.ddtree("kit-check", "kit", "check", kit, seconds=30)
    job.ddtree("kit-show", "kit", "show", kit, seconds=30)
    job.ddtree("kit-pack", "kit", "pack", kit, "--out", job.out / "sglang-h200.zip", seconds=30)
    patches = json.loads((kit / "data" / "patches" / "patches.json").read_text())
    found = {file["path"]: file["change"] for file in patches["files"]}
    is_found = found == {EDITED: "edited"}
    job.steps.append({"step": "the edited file is found, and no other", "state": "done" if is_found else str(found)})
    job._told(job.steps[-1])


def peer(job: Job) -> None:
    """On SGLang, then on the native server, each alone.

    Runs take seconds, so that what a tool does once, such as the peer's look at ``/server_info`` within its time, does
    not count.
    """
    home, rows = job.home, job.prompts.read_text(encoding="utf-8").splitlines()
    engines = {"sglang": (sglang_deployment(job, home.sglang), rows[:16]), "native": (native_deployment(job), rows)}
    for name in job.given.engines:
        text, asked = engines[name]
        deployment = job.written(f"{name}.toml", text)
        prompts = job.written(f"{name}-prompts.jsonl", "".join(f"{row}\n" for row in asked))
        if not job.ddtree(f"apply-{name}", "deploy", "apply", deployment, seconds=200):
            continue
        job.services = [deployment]
        command = [
            BENCHMARKS / "bench_agreement.py", "--base-url", f"http://127.0.0.1:{job.port}", "--peer", "sglang",
            "--peer-pythonpath", f"{home.sglang}:{home.packages}", "--tokenizer", home.target, "--prompts", prompts,
            "--concurrency", job.given.concurrency[1 if len(job.given.concurrency) > 1 else 0],
            "--max-tokens", 2 * job.given.max_tokens, "--runs", job.given.repeats or 10,
            "--out", job.out / f"{name}.json",
        ]  # fmt: skip
        job.step(f"agreement-{name}", command, 330)
        if job.ddtree(f"end-{name}", "deploy", "stop", deployment, seconds=30):
            job.services = []


def load(job: Job) -> None:
    """Both pieces of server_load.py; the cost at batch 1 first, since it is short."""
    home, given = job.home, job.given
    common = [
        BENCHMARKS / "server_load.py", "--target", home.target, "--drafter", home.drafter, "--prompts", home.prompts,
        "--device", given.device, "--dtype", given.dtype, "--out", job.out,
    ]  # fmt: skip
    most = given.max_tokens
    modes = ["--modes", "ar,chain,auto,tree32,tree64"]
    short = ["--overhead-prompts", given.requests or 10, "--repeats", given.repeats or 3]
    job.step("overhead", [*common, "--pieces", "overhead", *modes, *short, "--max-tokens", 2 * most], 150)
    crowd = ["--concurrency", "1,2,4,8,16,32,64" if given.device == "cuda" else "1,2", "--repeats", given.repeats or 2]
    crowd += ["--count", given.prompts, "--max-tokens", most]
    if not given.requests:  # enough of them for a p99
        crowd += ["--requests-per-client", 4, "--least-requests", 24]
    job.step("load", [*common, "--pieces", "load", "--modes", "ar,chain,auto,tree32", *crowd], 300)


def verify(job: Job) -> None:
    command = [
        BENCHMARKS / "record_sglang_pages.py", "--home", job.home.root, "--out", job.out / "pages",
        "--logs", job.out / "logs", "--port", job.port, "--device", job.given.device,
    ]  # fmt: skip
    only = ["--only", *job.given.only] if job.given.only else []
    job.step("pages", [*command, *only], job.given.seconds)


JOBS: dict[str, tuple[Callable[[Job], None], int]] = {
    "verify": (verify, 21000), "sweep-native": (sweep_native, 24100), "sweep-sglang": (sweep_sglang, 24200),
    "peer": (peer, 24300), "load": (load, 24400),
}  # fmt: skip
"""Each with the first port that it uses."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["prepare", *JOBS])
    parser.add_argument("--home", type=Path, default=Path("/opt/ddtree-ops"))
    parser.add_argument("--stage", type=Path, help="prepare: folder with wheels/, target/, prompts/ and kit/")
    parser.add_argument("--out", type=Path, help="a job: folder for what it finds")
    parser.add_argument("--seconds", type=float, default=500, help="a job: its time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=json.loads, default=[1, 4, 16], help="sweeps; peer takes the second")
    parser.add_argument("--repeats", type=int, help="in place of each job's own number")
    parser.add_argument("--requests", type=int, help="in place of each job's own number")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--engines", nargs="*", default=["sglang", "native"], choices=["sglang", "native"])
    parser.add_argument("--only", nargs="*", help="verify: single cases")
    parser.add_argument("--port", type=int, help="first port, where one job runs twice at a time")
    given = parser.parse_args()
    given.home = given.home.absolute()
    if given.job == "prepare":
        if given.stage is None:
            parser.error("prepare needs --stage")
        Home(given.home).prepare(given.stage.absolute())
        return 0
    if given.out is None:
        parser.error(f"{given.job} needs --out")
    given.out = given.out.absolute()
    work, port = JOBS[given.job]
    job = Job(given.job, given, given.port or port)
    try:
        work(job)
    finally:
        is_well = job.end()
    print(f"{given.job}: {'all steps are done' if is_well else 'not all steps ended well'}", flush=True)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
