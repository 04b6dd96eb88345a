"""A sweep of the demo's pair that is killed and resumed, against one that was let be: the same set of results?

    python benchmarks/sweep_kills.py --out benchmarks/results/sweep_kills_cpu.json
    python benchmarks/sweep_kills.py --target DIR --seed 7 --kills 3 --work DIR --out result.json
    python benchmarks/sweep_kills.py --small --kills 12 --out soak.json

Real parts alone: `ddtree sweep` as a command, `ddtree serve` as the service it deploys (supervisor `process`, on the
CPU), verification before each server is measured. The sweep is that of `examples/laptop-sweep`: budget {0, 8, 32} x
top-k cap {1, 4} x concurrency {1, 4}, and a draft window of {none, 512} at 2,048 tokens of context. It runs once
without a break. Then it runs again and is killed at `--kills` instants, and each time resumed at once. An instant is
drawn evenly over the time that the first run took, and stands for how far that was by then: so many units, and so many
seconds since the last of them.

sweep             SIGKILL to the sweep and all of its process group. The server is in a session of its own and lives on,
                  as it does when the machine runs out of memory or a terminal goes away.
sweep and server  SIGKILL to both, as far as that can be had without pulling a plug. Every second kill.

Compared are points with status and verdict, units, requests, and what verification found; nothing that is a time.
`--target` takes SmolLM2-135M-Instruct from a folder; else the service fetches it. `--small` is a try: two answers of
16 tokens in place of four of 48, once in place of twice, and a context of 256.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddtree.bench.files import folders_with, whole_lines
from ddtree.bench.provenance import PACKAGES, commit, host, versions
from ddtree.bench.result_folder import INTERRUPTED, REQUESTS, RUN, RUNNING, read_requests, read_run, read_units
from ddtree.bench.sweep.loaded import load_sweep
from ddtree.bench.sweep.run import RECOMMENDED
from ddtree.bench.sweep.store import SWEEP, read_points
from ddtree.demo import drafter_folder

ROOT = Path(__file__).resolve().parents[1]
SERVICE = "ddtree-sweep-kills"
LIMIT_S = 20 * 60.0

DEPLOYMENT_TEXT = """
engine = {{ kind = "native" }}
{model}
speculation = {{ algorithm = "ddtree", budget = 16 }}
runtime = {{ device = "cpu", context_length = 2560, max_running_requests = 4 }}
service = {{ name = "{service}", supervisor = "process", port = {port}, ready_timeout_s = 300.0 }}
"""
SWEEP_TEXT = """
deployment = "deployment.toml"
[bench]
workloads = ["questions=prompts.jsonl"]
repeats = {repeats}
requests = {requests}
max_tokens = {max_tokens}
[verify]
probe_tokens = 32
[[sweep]]
name = "budget"
grid = {{ "speculation.budget" = [0, 8, 32], "speculation.topk_cap" = [1, 4] }}
bench = {{ concurrency = [1, 4] }}
[[sweep]]
name = "window"
grid = {{ "speculation.draft_window" = ["unset", 512] }}
bench = {{ contexts = [{context}], pad_text = "pad", requests = 2 }}
"""
FULL = {"repeats": 2, "requests": 4, "max_tokens": 48, "context": 2048}
SMALL = {"repeats": 1, "requests": 2, "max_tokens": 16, "context": 256}


@dataclass(frozen=True)
class Kill:
    """One of the kills, and what it met.

    Attributes:
        drawn_s: the instant, in seconds of the run without a break.
        after_units, after_s: how far that run was then.
        run_s: how long this attempt had run.
        killed: ``sweep``, or ``sweep and server`` where a server was there to be killed.
        units: complete units on disk.
        stage: the last line that the sweep told.
    """

    drawn_s: float
    after_units: int
    after_s: float
    run_s: float
    killed: str
    points: int
    units: int
    stage: str
    load_1min: float


class Bench:
    """A working folder with the sweep's files, and the service's state apart from the user's."""

    def __init__(self, work: Path, target: Path | None, sizes: dict[str, int]) -> None:
        self.work, self.file = work, work / "sweep.toml"
        self.environment = os.environ | {"XDG_STATE_HOME": str(work / "state")}
        work.mkdir(parents=True, exist_ok=True)
        example = ROOT / "examples" / "laptop-sweep"
        shutil.copy(example / "prompts.jsonl", work)
        shutil.copytree(ROOT / "docs", work / "pad", dirs_exist_ok=True)
        model = "model = { demo = true }"
        if target is not None:
            model = f"model = {{ path = {json.dumps(str(target.resolve()))} }}\n"
            model += f"drafter = {{ path = {json.dumps(str(drafter_folder()))} }}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (work / "deployment.toml").write_text(DEPLOYMENT_TEXT.format(model=model, service=SERVICE, port=port))
        self.file.write_text(SWEEP_TEXT.format(**sizes))

    def start(self, out: Path) -> subprocess.Popen[bytes]:
        """The sweep as a process group of its own; what it tells goes to a file beside its results."""
        with out.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "ddtree", "sweep", str(self.file), "--out", str(out), "--resume"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )

    def whole(self, out: Path) -> float:
        """Let it run to its end; returns seconds."""
        began = time.monotonic()
        process = self.start(out)
        if process.wait():
            raise SystemExit(f"the sweep ended with {process.returncode}: see {out.with_suffix('.log')}")
        return time.monotonic() - began

    def killed(self, out: Path, instants: Iterable[tuple[float, int, float]]) -> tuple[list[Kill], float]:
        """Kill it at each instant and resume it; returns what was met, and the seconds that it ran in all."""
        kills: list[Kill] = []
        run_s = 0.0
        for number, (drawn_s, units, after_s) in enumerate(instants):
            process, began = self.start(out), time.monotonic()
            while process.poll() is None and units_of(out) < units:
                time.sleep(0.2)
            with suppress(subprocess.TimeoutExpired):
                process.wait(after_s)
                raise SystemExit(f"it was over before kill {number + 1}: see {out.with_suffix('.log')}")
            killed = self.kill(process, with_server=number % 2 == 1)
            run_s += (this_s := time.monotonic() - began)
            kill = Kill(
                drawn_s=round(drawn_s, 1),
                after_units=units,
                after_s=round(after_s, 1),
                run_s=round(this_s, 1),
                killed=killed,
                points=len(read_points(out)),
                units=units_of(out),
                stage=last_line(out.with_suffix(".log")),
                load_1min=round(os.getloadavg()[0], 2),
            )
            print(f"killed {killed} at {kill.points} points, {kill.units} units: {kill.stage}", flush=True)
            kills.append(kill)
        return kills, run_s + self.whole(out)

    def kill(self, process: subprocess.Popen[bytes], *, with_server: bool) -> str:
        os.killpg(process.pid, signal.SIGKILL)
        killed = "sweep"
        if with_server and (server := self.server()):
            with suppress(ProcessLookupError):
                os.killpg(server, signal.SIGKILL)
                killed = "sweep and server"
        process.wait()
        return killed

    def server(self) -> int | None:
        """The session of the service, where one was started."""
        with suppress(OSError, ValueError):
            return int((self.work / "state" / "ddtree" / SERVICE / "pid").read_text())
        return None

    def stop(self) -> None:
        subprocess.run(
            [sys.executable, "-m", "ddtree", "deploy", "stop", str(self.work / "deployment.toml")],
            env=self.environment,
            capture_output=True,
            check=False,
        )


def units_of(out: Path) -> int:
    return sum(len(read_units(run)) for run in folders_with(out, RUN))


def last_line(log: Path) -> str:
    return "".join(log.read_text(errors="replace").splitlines()[-1:]).strip()


def draw(whole: Path, whole_s: float, count: int, seed: int) -> list[tuple[float, int, float]]:
    """Instants in the order in which they come: seconds of the run without a break, units by then, seconds since."""
    began = json.loads((whole / SWEEP).read_text())["created_at"]
    ends = sorted(
        unit.started_at + unit.duration_s - began for run in folders_with(whole, RUN) for unit in read_units(run)
    )
    chance = random.Random(seed)
    instants = []
    for drawn_s in sorted(chance.uniform(0.0, whole_s) for _ in range(count)):
        before = [end for end in ends if end <= drawn_s]
        instants.append((drawn_s, len(before), drawn_s - max(before, default=0.0)))
    return instants


def shape(out: Path) -> dict[str, Counter[tuple[Any, ...]]]:
    """What a sweep left, each thing with how often it is there, and without anything that is a time."""
    found: dict[str, Counter[tuple[Any, ...]]] = {
        "points": Counter(
            (row.point, row.status, row.same_as, row.variant, row.folder, row.verdict) for row in read_points(out)
        ),
        "units": Counter(),
        "requests": Counter(),
        "claims": Counter(),
    }
    for run in folders_with(out, RUN):
        place = run.relative_to(out).as_posix()
        found["units"].update((place, unit.unit, unit.requests) for unit in read_units(run))
        found["requests"].update(
            (place, row.unit, row.prompt_id, row.turn, row.error_kind) for row in read_requests(run)
        )
        verdict = json.loads((run / "verify.json").read_text())
        found["claims"].update((place, each["probe"], each["claim"], each["status"]) for each in verdict["findings"])
    return found


def faults(whole: Path, killed: Path, planned: list[str]) -> list[str]:
    """Everything in which the two differ, and everything in either that is not there exactly once."""
    wanted, got = shape(whole), shape(killed)
    told = []
    for name in wanted:
        told += [f"{name}: only without a break: {each}" for each in (wanted[name] - got[name]).elements()]
        told += [f"{name}: only when killed: {each}" for each in (got[name] - wanted[name]).elements()]
        if name != "requests":  # the same question may come twice in a unit
            told += [f"{name}: {count} times: {each}" for each, count in got[name].items() if count > 1]
    for out in (whole, killed):
        if sorted(row.point for row in read_points(out)) != sorted(planned):
            told.append(f"{out.name}: other points than were planned")
        if not (out / RECOMMENDED).exists():
            told.append(f"{out.name}: no {RECOMMENDED}")
        for run in folders_with(out, RUN):
            place = f"{out.name}/{run.relative_to(out)}"
            units, rows = read_units(run), read_requests(run)
            if sorted(unit.unit for unit in units) != sorted(read_run(run).plan.units):
                told.append(f"{place}: other units than were planned")
            if Counter(row.unit for row in rows) != {unit.unit: unit.requests for unit in units}:
                told.append(f"{place}: more or fewer requests than its units say")
            if (run / RUNNING).exists() or len(whole_lines(run / REQUESTS)) != len(rows):
                told.append(f"{place}: rows of no unit")
    return told


def texts_alike(whole: Path, killed: Path) -> tuple[int, int]:
    """Requests with the same prompt whose answers are the same, and all."""

    def texts(out: Path) -> dict[tuple[Any, ...], Any]:
        return {
            (run.name, row.unit, row.prompt_id, row.turn, row.prompt_sha256): row.text_sha256
            for run in folders_with(out, RUN)
            for row in read_requests(run)
        }

    one, other = texts(whole), texts(killed)
    return sum(other.get(key) == text for key, text in one.items()), len(one)


def interrupted(out: Path) -> int:
    """Rows of units that were cut off, which are kept apart."""
    return sum(len(whole_lines(path / INTERRUPTED)) for path in folders_with(out, INTERRUPTED))


def table(rows: list[tuple[str, Any, Any]]) -> None:
    for name, one, other in rows:
        print(f"{name:<36}{one!s:>16}{other!s:>16}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("--target", type=Path, help="folder of SmolLM2-135M-Instruct; fetched if left out")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--work", type=Path, help="new folder for sweeps and logs; a temporary one if left out")
    parser.add_argument("--small", action="store_true", help="a try at reduced size")
    arguments = parser.parse_args()
    if arguments.work is not None and arguments.work.exists():
        parser.error(f"{arguments.work} is there already: name a new folder")
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="sweep-kills-"))).resolve()
    sizes = SMALL if arguments.small else FULL
    bench = Bench(work, arguments.target, sizes)
    planned = [point.name for point in load_sweep(bench.file).plan.points]
    machine = host()
    whole, killed = work / "whole", work / "killed"
    try:
        whole_s = bench.whole(whole)
        print(f"without a break: {whole_s:.0f} s", flush=True)
        instants = draw(whole, whole_s, arguments.kills, arguments.seed)
        print(
            "instants:",
            ", ".join(f"{at_s:.1f} s (unit {n} and {more:.1f} s)" for at_s, n, more in instants),
            flush=True,
        )
        kills, killed_s = bench.killed(killed, instants)
    finally:
        bench.stop()

    found, one, other = faults(whole, killed, planned), shape(whole), shape(killed)
    alike, answers = texts_alike(whole, killed)
    statuses = {out.name: dict(Counter(row.status for row in read_points(out))) for out in (whole, killed)}
    verdicts = {
        out.name: dict(Counter(row.verdict for row in read_points(out) if row.verdict is not None))
        for out in (whole, killed)
    }
    table(
        [
            ("", "without a break", "killed"),
            ("seconds", round(whole_s), round(killed_s)),
            ("points", one["points"].total(), other["points"].total()),
            *((f"  {status}", count, statuses["killed"].get(status, 0)) for status, count in statuses["whole"].items()),
            ("units", units_of(whole), units_of(killed)),
            ("requests", one["requests"].total(), other["requests"].total()),
            ("claims that verification looked at", one["claims"].total(), other["claims"].total()),
            ("rows of units that were cut off", interrupted(whole), interrupted(killed)),
        ]
    )
    print(f"answers alike: {alike} of {answers}")
    print(*(found or ["the same set of results, nothing lost or doubled"]), sep="\n")
    result = {
        "what": "the same sweep without a break, and killed by SIGKILL and resumed: points, units, requests, claims",
        "small": arguments.small,
        "sizes": sizes,
        "seed": arguments.seed,
        "commit": commit(),
        "versions": versions(PACKAGES),
        "host": machine,
        "load_1min_at_end": round(os.getloadavg()[0], 2),
        "whole_s": round(whole_s, 1),
        "killed_s": round(killed_s, 1),
        "is_under_20_min": whole_s < LIMIT_S,
        "kills": [asdict(kill) for kill in kills],
        "points": {name: {row.point: row.status for row in read_points(work / name)} for name in ("whole", "killed")},
        "counts": {name: {key: value.total() for key, value in shape(work / name).items()} for name in statuses},
        "verdicts": verdicts,
        "interrupted_rows": {out.name: interrupted(out) for out in (whole, killed)},
        "answers_alike": [alike, answers],
        "faults": found,
        "is_same": not found,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"work is in {work}")
    return int(bool(found) or whole_s >= LIMIT_S)


if __name__ == "__main__":
    raise SystemExit(main())
