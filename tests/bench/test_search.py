"""Smart search with the real optuna: it gets better, forgets nothing, and repeats nothing."""

from __future__ import annotations

import math
import random
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter

import pytest

from bench.made_rows import write_run
from bench.sweeps import ddtree, shape, write_sweep
from ddtree.bench.sweep.loaded import load_sweep
from ddtree.bench.sweep.store import PointRow, append_point, read_points
from ddtree.errors import UserError

SEARCH = """
[[sweep]]
name = "tune"
[sweep.search]
trials = 40
[sweep.search.keys]
"speculation.budget" = { low = 1, high = 1024, log = true }
"speculation.topk_cap" = [1, 2, 4, 8]
"""


def only_search(folder, text=SEARCH):
    (search,) = load_sweep(write_sweep(folder, text)).searches
    return search


def speed(settings):
    """Best at budget 64 and cap 4."""
    budget, cap = settings["speculation.budget"], settings["speculation.topk_cap"]
    return 1000.0 / (1 + (math.log2(budget) - 6) ** 2 + (math.log2(cap) - 2) ** 2)


def chance():
    """The mean of points that are drawn blindly."""
    draw = random.Random(0)
    settings = [
        {"speculation.budget": round(2 ** draw.uniform(0, 10)), "speculation.topk_cap": draw.choice([1, 2, 4, 8])}
        for _ in range(2000)
    ]
    return sum(map(speed, settings)) / len(settings)


def measure(folder, point, number, total_tok_s, status="measured"):
    """As a sweep leaves it: results in a folder, then the row."""
    place = f"points/{number}"
    write_run(folder / place, {("w", None, 1, "ar"): {"total_tok_s": total_tok_s}}, repetitions=2)
    row = PointRow(
        sweep_id="s", point=point.name, settings=point.settings, status=status, folder=place, variant="ar",
        finished_at=1.0, duration_s=1.0,
    )  # fmt: skip
    append_point(folder, row)


def run_all(search, folder, most=100):
    folder.mkdir(exist_ok=True)
    points = []
    while len(points) < most and (point := search.next_point(read_points(folder), folder)) is not None:
        assert point.name not in {each.name for each in points}
        if point.runs:
            measure(folder, point, len(read_points(folder)), speed(point.settings))
        else:
            row = PointRow(
                sweep_id="s", point=point.name, settings=point.settings, status="same", same_as=point.same_as,
                finished_at=1.0, duration_s=0.0,
            )  # fmt: skip
            append_point(folder, row)
        points.append(point)
    return points


def test_it_finds_what_is_best(folder):
    points = run_all(only_search(folder), folder / "out")
    assert len(points) == 40
    found = [speed(point.settings) for point in points]
    assert max(found) > 900, "a third of an octave from the best, of ten and four caps"
    assert sum(found[20:]) / 20 > 1.5 * chance()
    for point in points:
        assert 1 <= point.settings["speculation.budget"] <= 1024 and point.settings["speculation.topk_cap"] in (
            1,
            2,
            4,
            8,
        )


def test_steps_of_a_draft_temperature_are_plain_numbers(folder):
    """The third of optuna's own steps is 0.30000000000000004."""
    steps = '"speculation.draft_temperature" = { low = 0.1, high = 0.5, step = 0.1 }'
    search = only_search(folder, SEARCH.replace('"speculation.topk_cap" = [1, 2, 4, 8]', steps))
    out = folder / "out"
    out.mkdir()
    found = []
    for number in range(12):
        point = search.next_point(read_points(out), out)
        speculation = point.deployment.speculation
        assert (speculation.draft_temperature is None) == (speculation.budget == 1), "a tree of one node has none"
        found.append(speculation.draft_temperature)
        measure(out, point, number, 100.0)
    assert set(found) - {None} <= {0.1, 0.2, 0.3, 0.4, 0.5} and 0.3 in found


def test_what_was_measured_is_all_that_decides(folder):
    """So a search that was cut off goes on as it would have."""
    search = only_search(folder)
    whole = run_all(search, folder / "whole")
    run_all(search, folder / "cut", most=7)
    again = only_search(folder)  # as a new process would make it
    assert again.next_point(read_points(folder / "cut"), folder / "cut").name == whole[7].name
    rest = run_all(again, folder / "cut")
    assert [point.name for point in rest] == [point.name for point in whole[7:]]


def test_what_failed_is_not_asked_again_and_is_no_success(folder):
    search, out = only_search(folder), folder / "out"
    out.mkdir()
    for number in range(12):
        point = search.next_point(read_points(out), out)
        is_small = point.settings["speculation.budget"] < 100
        measure(out, point, number, 1e6 if not is_small else 10.0, status="measured" if is_small else "failed")
    rows = read_points(out)
    assert len({row.point for row in rows}) == 12
    assert {row.status for row in rows} == {"measured", "failed"}


def test_the_objective_decides_which_way_is_up(folder):
    """The same answers, sought by their first token: the slowest first tokens are worst."""
    text = SEARCH.replace("trials = 40", 'trials = 40\nobjective = "ttft_ms"')
    search, out = only_search(folder, text), folder / "out"
    out.mkdir()
    for number in range(40):
        point = search.next_point(read_points(out), out)
        place = f"points/{number}"
        slow = {"ttft_ms": 1e5 / speed(point.settings), "total_tok_s": 1 / speed(point.settings)}
        write_run(out / place, {("w", None, 1, "ar"): slow}, repetitions=2)
        row = PointRow(
            sweep_id="s", point=point.name, settings=point.settings, status="measured", folder=place, variant="ar",
            finished_at=1.0, duration_s=1.0,
        )  # fmt: skip
        append_point(out, row)
    found = [speed(row.settings) for row in read_points(out)]
    assert sum(found[20:]) / 20 > 1.5 * chance()


def test_points_that_share_a_server_are_asked_for_by_request(folder):
    search = only_search(folder)
    group = search.group(search.point({"speculation.budget": 32, "speculation.topk_cap": 4}))
    assert group.deployment.speculation.budget == 16, "the deployment file's"
    assert [variant.name for variant in group.variants] == ["tree:32:4"]
    windows = SEARCH.replace('"speculation.topk_cap" = [1, 2, 4, 8]', '"speculation.draft_window" = [64, 512]')
    other = only_search(folder, windows)
    group = other.group(other.point({"speculation.budget": 32, "speculation.draft_window": 64}))
    assert group.deployment.speculation.draft_window == 64 and group.variants[0].name == "tree:32"


def test_a_search_ends_where_nothing_is_new(folder):
    text = """
    [[sweep]]
    name = "few"
    [sweep.search]
    trials = 9
    keys = { "speculation.budget" = [4, 8, 16] }
    """
    search, out = only_search(folder, text), folder / "out"
    out.mkdir()
    names = []
    while (point := search.next_point(read_points(out), out)) is not None:
        measure(out, point, len(names), 100.0)
        names.append(point.name)
    assert sorted(names) == ["few: budget=16", "few: budget=4", "few: budget=8"]


def test_a_search_is_swept_killed_and_gone_on_with(folder):
    """From end to end: windows of 13 crash the engine, pp is refused, and the best is deployed."""
    text = """
    [[sweep]]
    name = "tune"
    [sweep.search]
    trials = 6
    [sweep.search.keys]
    "speculation.draft_window" = [13, 64, 512]
    "speculation.budget" = { low = 4, high = 64 }
    """
    file, out = write_sweep(folder, text), folder / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "ddtree", "sweep", str(file), "--out", str(out)], stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if line.startswith("[group 2 of 6]"):
            break
    time.sleep(0.7)
    process.send_signal(signal.SIGKILL)
    process.stderr.close()
    assert process.wait() == -signal.SIGKILL
    done = ddtree("sweep", file, "--out", out, "--resume")
    rows = read_points(out)
    assert len(rows) == len({row.point for row in rows}) == 6
    crashed = {row.point for row in rows if row.settings["speculation.draft_window"] == 13}
    assert {row.point for row in rows if row.status == "failed"} == crashed
    assert Counter(shape(out)[0].values()) == {1: 6}
    chosen = tomllib.loads((out / "recommended.toml").read_text())["speculation"]
    assert chosen["draft_window"] in (64, 512) and 4 <= chosen["budget"] <= 64
    assert "recommended: tune: " in done.stdout
    assert "search tune: 0 points at most" in ddtree("sweep", file, "--out", out, "--dry-run").stdout


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("trials = 0\nkeys = { 'speculation.budget' = [1, 2] }", "greater than or equal to 1"),
        ("trials = 3\nkeys = {}", "give keys"),
        ("trials = 3\nkeys = { 'speculation.budget' = [4] }", "less than two values"),
        ("trials = 3\nkeys = { 'speculation.budget' = { low = 9, high = 9 } }", "is not below high"),
        ("trials = 3\nkeys = { 'speculation.budget' = { low = 0, high = 9, log = true } }", "log goes with"),
        ("trials = 3\nkeys = { 'speculation.budgets' = [1, 2] }", "unknown key speculation.budgets"),
        ("trials = 3\nobjective = 'tau'\nkeys = { 'speculation.budget' = [1, 2] }", "objective"),
    ],
)
def test_bad_searches_are_refused(folder, table, told):
    with pytest.raises(UserError, match=told):
        load_sweep(write_sweep(folder, f"[[sweep]]\nname = 'x'\n[sweep.search]\n{table}\n"))


def test_it_says_what_is_missing_without_optuna(folder, monkeypatch):
    monkeypatch.setattr("ddtree.extras.find_spec", lambda package: None)
    with pytest.raises(UserError) as refused:
        only_search(folder)
    assert refused.value.remedy == "pip install 'ddtree[search]'"
