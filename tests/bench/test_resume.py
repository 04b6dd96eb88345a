"""A run that is killed and resumed ends up with the same set of results as one that was let be."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from bench.fault_server import Behaviour, serving
from ddtree.bench.files import locked
from ddtree.bench.result_folder import ResultFolder, read_requests, read_run, read_units
from ddtree.errors import UserError

REPEATS, REQUESTS = 2, 3


@pytest.fixture(scope="module")
def server():
    with serving(Behaviour(first_s=0.01, gap_s=0.01, chunks=4, is_native=True)) as url:
        yield url


@pytest.fixture(scope="module")
def command(tmp_path_factory, server):
    prompts = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{i}", "turns": [f"question {i}"]}) + "\n" for i in range(5)))
    return [
        *(sys.executable, "-m", "ddtree", "bench", "--workload", str(prompts), "--base-url", server),
        *("--variant", "ar,tree:8", "--concurrency", "1,2", "--repeats", str(REPEATS), "--requests", str(REQUESTS)),
        *("--max-tokens", "64", "--warm-up", "1"),
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, command):
    """A run that was let be; to be copied, not written to."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    done = run(command, folder)
    assert done.returncode == 0, done.stderr
    return folder


def run(command, out, *more):
    return subprocess.run([*command, "--out", str(out), *more], capture_output=True, text=True, timeout=120)


def shape(folder):
    """Which units and requests there are, and how often each."""
    units = Counter(unit.unit for unit in read_units(folder))
    requests = Counter((row.unit, row.prompt_id, row.turn, row.error_kind) for row in read_requests(folder))
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    return units, requests, len(lines)


def test_killed_at_random_instants_and_resumed(tmp_path, command, whole):
    expected = shape(whole)
    assert set(expected[0].values()) == {1} and len(expected[0]) == 4 * REPEATS
    assert sum(expected[1].values()) == expected[2] == 4 * REPEATS * REQUESTS

    killed, chance = tmp_path / "killed", random.Random(7)
    kills = 0
    for _ in range(3):
        process = subprocess.Popen([*command, "--out", str(killed), "--resume"], stderr=subprocess.DEVNULL)
        started = time.monotonic()
        have = (killed / "units.jsonl").stat().st_size if (killed / "units.jsonl").exists() else 0
        while process.poll() is None and time.monotonic() - started < 60:  # past the start, into the units
            path = killed / "units.jsonl"
            if path.exists() and path.stat().st_size > have:
                break
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills == 3, "the run was over before it could be killed"
    done = run(command, killed, "--resume")
    assert done.returncode == 0, done.stderr
    assert shape(killed) == expected
    assert not (killed / "running.jsonl").exists()


def test_a_crash_between_any_two_writes(tmp_path, whole):
    """The folder as a crash could leave it, at every byte of the last unit's traces: what is read is whole units."""
    units, requests = (whole / "units.jsonl").read_bytes(), (whole / "requests.jsonl").read_bytes()
    before = units.rstrip(b"\n").rfind(b"\n") + 1
    first_rows = json.loads(units[:before].splitlines()[-1])["requests_end_byte"]
    rows = requests[first_rows:]
    for cut in (0, 1, len(rows) // 2, len(rows) - 1, len(rows)):
        for line in (0, 1, len(units) - before - 1):
            if line and cut < len(rows):
                continue  # the unit's line is written after its rows
            folder = tmp_path / f"cut-{cut}-{line}"
            folder.mkdir()
            (folder / "run.json").write_bytes((whole / "run.json").read_bytes())
            (folder / "units.jsonl").write_bytes(units[: before + line])
            (folder / "requests.jsonl").write_bytes(requests[: first_rows + cut])
            (folder / "running.jsonl").write_bytes(rows + b'{"torn')
            with ResultFolder(folder) as results:
                results.begin(read_run(whole), resume=True)
                assert len(results.done()) == 4 * REPEATS - 1
                assert len(read_requests(folder)) == len(requests[:first_rows].splitlines())
                assert (folder / "requests.jsonl").stat().st_size == first_rows
                assert sum(results.attempts().values()) == 1


def test_ctrl_c_keeps_what_is_done(tmp_path, command):
    out = tmp_path / "out"
    process = subprocess.Popen([*command, "--out", str(out)], stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("[3/"):
            break
    process.send_signal(signal.SIGINT)
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait(20) == 130 and "--resume" in told
    kept = len(read_units(out))
    assert 3 <= kept < 4 * REPEATS
    assert run(command, out, "--resume").returncode == 0
    assert len(read_units(out)) == 4 * REPEATS


def test_results_are_not_mixed(tmp_path, command, whole):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    again = run(command, out)
    assert again.returncode == 2 and "--resume" in again.stderr
    other = run(command, out, "--resume", "--seed", "5")
    assert other.returncode == 2 and "units are not the same" in other.stderr
    with locked(out):
        second = run(command, out, "--resume")
    assert second.returncode == 2 and "another process" in second.stderr
    resumed = run(command, out, "--resume")
    assert resumed.returncode == 0 and f"{4 * REPEATS} of {4 * REPEATS} units are done already" in resumed.stderr


def test_a_damaged_folder_is_told(tmp_path, command, whole):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "requests.jsonl").write_bytes((out / "requests.jsonl").read_bytes()[:-100])
    with pytest.raises(UserError, match=r"holds . rows of .* units.jsonl says 3"):
        read_requests(out)
    assert run(command, out, "--resume").returncode == 2


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("requests.jsonl", lambda old: b"", "holds 0 rows of"),
        ("requests.jsonl", lambda old: old + old.splitlines(keepends=True)[0], "holds 4 rows of"),
        ("requests.jsonl", lambda old: old.replace(b"words", b"w\xffrds", 1), "not UTF-8"),
        ("units.jsonl", lambda old: old + old.splitlines(keepends=True)[0], "holds a unit twice"),
        ("units.jsonl", lambda old: old.replace(b'"1.0"', b'"2.0"', 1), "not of this version"),
        ("units.jsonl", lambda old: b"[" * 100_000 + b"\n", "not of this version"),
    ],
)
def test_what_was_altered_is_told(tmp_path, whole, name, change, told):
    shutil.copytree(whole, tmp_path / "out")
    path = tmp_path / "out" / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=told):
        read_requests(tmp_path / "out")


def test_a_torn_letter_at_the_end_is_no_damage(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "out")
    for name in ("requests.jsonl", "units.jsonl"):
        with (tmp_path / "out" / name).open("ab") as file:
            file.write('{"text": "ü'.encode()[:-1])
    assert shape_read(tmp_path / "out") == shape_read(whole)


def shape_read(folder):
    return len(read_units(folder)), len(read_requests(folder))
