"""Sweeps through the process supervisor, over a real HTTP server that plays the engine."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import tomllib

from bench.sweeps import ddtree, shape, write_sweep
from ddtree.bench.sweep.store import read_points

GRID = """
[[sweep]]
name = "budget"
grid = { "speculation.budget" = [0, 8, 32], "speculation.topk_cap" = [1, 4] }
bench = { concurrency = [1, 2] }
[[sweep]]
name = "window"
grid = { "speculation.draft_window" = ["unset", 512] }
"""


def test_killed_three_times_and_resumed(folder):
    """The set of results equals that of a sweep that was let be, and the server runs as recommended."""
    file = write_sweep(folder, GRID)
    whole, killed = folder / "whole", folder / "killed"
    assert ddtree("sweep", file, "--out", whole, "--no-restore").returncode == 0
    expected = shape(whole)
    assert set(expected[0].values()) == set(expected[1].values()) == {1}
    assert len(expected[0]) == 8 and len(expected[1]) == 5 * 2 * 2 + 2 * 2

    chance, kills = random.Random(3), 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "ddtree", "sweep", str(file), "--out", str(killed), "--resume"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in process.stderr:
            if line.startswith("["):
                break
        time.sleep(chance.uniform(0.0, 2.5))
        process.send_signal(signal.SIGKILL)
        process.stderr.close()
        kills += process.wait() == -signal.SIGKILL
    assert kills == 3
    ddtree("sweep", file, "--out", killed, "--resume")
    assert shape(killed) == expected

    recommended = tomllib.loads((killed / "recommended.toml").read_text())
    status = json.loads(ddtree("deploy", "status", folder / "d.toml", "--json").stdout)
    assert status["is_up"]
    installed = next((folder / "state").rglob("launch.sh")).read_text()
    assert recommended["speculation"]["algorithm"] == "ddtree"  # plain decoding is slower here
    assert f"--budget {recommended['speculation']['budget']}" in installed
    report = ddtree("report", killed, "--no-plots")
    assert report.stdout.startswith("recommended: ")


def test_what_fails_is_recorded_and_the_sweep_goes_on(folder):
    file = write_sweep(
        folder,
        """
        [[sweep]]
        name = "window"
        [sweep.grid]
        "speculation.draft_window" = ["unset", 13, 14, 512]
        "parallelism.pp" = ["unset", 8]
        [sweep.bench]
        requests = 8
        """,
    )
    out = folder / "out"
    done = ddtree("sweep", file, "--out", out)
    rows = {row.point.removeprefix("window: "): row for row in read_points(out)}
    status = {name: row.status for name, row in rows.items()}
    assert status == {
        "draft_window=unset, parallelism.pp=unset": "measured",
        "draft_window=unset, parallelism.pp=8": "refused",
        "draft_window=13, parallelism.pp=unset": "failed",
        "draft_window=13, parallelism.pp=8": "refused",
        "draft_window=14, parallelism.pp=unset": "failed",
        "draft_window=14, parallelism.pp=8": "refused",
        "draft_window=512, parallelism.pp=unset": "measured",
        "draft_window=512, parallelism.pp=8": "refused",
    }
    crashed = rows["draft_window=13, parallelism.pp=unset"]
    assert "illegal memory access" in (out / crashed.folder / crashed.log).read_text()
    under_load = rows["draft_window=14, parallelism.pp=unset"]
    assert "segmentation fault" in (out / under_load.folder / under_load.log).read_text()
    assert "the server has gone" in under_load.reason
    assert "parallelism.pp" in rows["draft_window=13, parallelism.pp=8"].reason
    assert "failed: window: draft_window=13" in done.stderr
    told = ddtree("report", out, "--no-plots", "--out", folder / "report")
    text = (folder / "report" / "findings.md").read_text()
    assert "draft_window 14" not in text.split("## Failures")[0], "a point that failed is among the numbers"
    assert "illegal" not in told.stdout and "| refused |" in text and "| failed |" in text


def test_what_is_not_what_it_claims_does_not_count(folder):
    """A silent fallback and a drafter of which nothing is accepted, deployed alone and asked for per request."""
    file = write_sweep(
        folder,
        """
        [[sweep]]
        name = "alone"
        grid = { "speculation.draft_window" = [15, 16] }
        [[sweep]]
        name = "together"
        [sweep.grid]
        "speculation.draft_window" = [15]
        "speculation.budget" = [8, 32]
        """,
    )
    out = folder / "out"
    done = ddtree("sweep", file, "--out", out, check=False)
    assert done.returncode == 1, "no point could be measured"
    rows = {row.point: (row.status, row.reason) for row in read_points(out)}
    assert rows == {
        "alone: draft_window=15": ("invalid", "ddtree was deployed, and answers were made in mode ar"),
        "alone: draft_window=16": ("invalid", "tau is 1.00, below 1.2: speculation brings nothing"),
        "together: draft_window=15, budget=8": ("invalid", "4 requests were not drafted as asked"),
        "together: draft_window=15, budget=32": ("invalid", "4 requests were not drafted as asked"),
    }
    assert tomllib.loads((out / "recommended.toml").read_text()) == tomllib.loads((folder / "d.toml").read_text())
    assert "draft_window" not in next((folder / "state").rglob("launch.sh")).read_text()


def test_a_crash_of_one_variant_does_not_take_the_others_with_it(folder):
    """Measured together, one point's crash breaks all; each is then measured by itself."""
    file = write_sweep(
        folder,
        """
        [[sweep]]
        name = "load"
        [sweep.grid]
        "speculation.draft_window" = [14]
        "speculation.budget" = [8, 16]
        [sweep.bench]
        requests = 2
        warm_up = 0
        """,
    )
    out = folder / "out"
    ddtree("sweep", file, "--out", out, "--no-restore", check=False)
    rows = read_points(out)
    # The seventh request breaks the engine: eight of both points do, four of each alone do not.
    assert len(list(out.rglob("split"))) == 1
    assert [row.status for row in rows] == ["measured", "measured"]


def test_a_dry_run_touches_nothing(folder):
    file = write_sweep(folder, GRID + '[[sweep]]\nname = "pp"\npoints = [{ "parallelism.pp" = 8 }]\n')
    told = ddtree("sweep", file, "--out", folder / "out", "--dry-run", "--assume-tok-s", "50").stdout
    assert "the same as budget: budget=0, topk_cap=1" in " ".join(told.split())
    assert "refused: parallelism.pp with the native engine" in " ".join(told.split())
    assert "in all 48 requests" in told and "50 tok/s" in told
    assert not (folder / "out").exists() and not (folder / "state").exists()


def test_sweeps_are_not_mixed(folder):
    file = write_sweep(folder, '[[sweep]]\nname = "one"\npoints = [{ "speculation.budget" = 8 }]\n')
    out = folder / "out"
    ddtree("sweep", file, "--out", out)
    again = ddtree("sweep", file, "--out", out, check=False)
    assert again.returncode == 2 and "--resume" in again.stderr
    write_sweep(folder, '[[sweep]]\nname = "one"\npoints = [{ "speculation.budget" = 9 }]\n')
    other = ddtree("sweep", file, "--out", out, "--resume", check=False)
    assert other.returncode == 2 and "another sweep file" in other.stderr


def test_prompts_that_changed_are_refused(folder):
    """Two workloads of one name are told apart, and so is the text that contexts are filled with."""
    (folder / "pad.txt").write_text("Some text to read before the question. " * 20)
    (folder / "more").mkdir()
    (folder / "more" / "w.jsonl").write_text(json.dumps({"id": "q", "turns": ["word"]}) + "\n")
    file = write_sweep(
        folder,
        """
        [[sweep]]
        name = "one"
        points = [{ "speculation.budget" = 8 }]
        [[sweep]]
        name = "two"
        points = [{ "speculation.budget" = 9 }]
        bench = { workloads = ["more/w.jsonl"], contexts = [64], pad_text = "pad.txt" }
        """,
    )
    out = folder / "out"
    ddtree("sweep", file, "--out", out)
    for name in ("w.jsonl", "more/w.jsonl", "pad.txt"):
        before = (folder / name).read_text()
        (folder / name).write_text(before.replace("word", "other word").replace("Some", "Other"))
        changed = ddtree("sweep", file, "--out", out, "--resume", check=False)
        assert changed.returncode == 2 and "another workload or pad text" in changed.stderr, name
        (folder / name).write_text(before)
    assert ddtree("sweep", file, "--out", out, "--resume").returncode == 0
