"""What `benchmarks/ops_h200.py` would deploy and sweep on a GPU machine is what ddtree takes, and runs without one."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree.bench.sweep.loaded import load_sweep
from ddtree.deploy import Deployment
from ddtree.deploy.command import render_command
from ddtree.deploy.deployment import load_deployment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def ops(monkeypatch):
    """The script as a module; one that it imports has a name that a folder of tests has too."""
    for folder in (BENCHMARKS / "sglang_h200", BENCHMARKS):
        monkeypatch.syspath_prepend(str(folder))
    others = sys.modules.pop("kit", None)
    import ops_h200

    sys.modules.pop("kit", None)
    if others is not None:
        sys.modules["kit"] = others
    return ops_h200


@pytest.fixture
def job(ops, tmp_path):
    """A job whose programs are not run; its prompts are there."""
    home = tmp_path / "home"
    (home / "prompts").mkdir(parents=True)
    for name in ("gsm8k_test100", "humaneval"):
        rows = [json.dumps({"turns": [f"{name} {i}"]}) for i in range(3)]
        (home / "prompts" / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    given = argparse.Namespace(
        home=home, out=tmp_path / "out", seconds=100, device="cuda", dtype="bfloat16", concurrency=[1, 4, 16],
        repeats=None, requests=None, prompts=4, max_tokens=64,
    )  # fmt: skip
    job = ops.Job("some", given, 24000)
    job.step = lambda name, command, *rest, **more: job.steps.append({"step": name, "command": command}) is None
    return job


def test_prompts_are_taken_in_turn(job):
    rows = [json.loads(line)["turns"][0] for line in job.prompts.read_text().splitlines()]
    assert rows == ["gsm8k_test100 0", "humaneval 0", "gsm8k_test100 1", "humaneval 1"]


def test_the_native_sweep_has_one_server(ops, job):
    ops.sweep_native(job)
    plan = load_sweep(job.out / "native-sweep.toml").plan
    assert not any(point.refused or point.same_as for point in plan.points)
    (group,) = plan.groups
    assert group.deployment.speculation.budget == 64, "of a width, so that verify can count nodes"
    assert [variant.name for variant in group.variants] == [
        "ar", "tree:64", "chain:15", "tree:auto", "tree:8", "tree:16", "tree:32", "tree:128",
    ]  # fmt: skip
    assert group.deployment.runtime.env["PYTHONPATH"].endswith("/home/ddtree")


def test_the_sglang_sweep_starts_a_server_for_each_point(ops, job, monkeypatch):
    monkeypatch.setattr(ops, "seal", lambda *given: None)
    ops.sweep_sglang(job)
    plan = load_sweep(job.out / "sglang-sweep.toml").plan
    assert not any(point.refused or point.same_as for point in plan.points)
    assert [point.name for point in plan.points] == [
        "sglang: budget=32", "sglang: algorithm=none", "sglang: algorithm=dflash, budget=unset", "sglang: budget=64",
        "sglang: budget=16", "sglang: budget=8",
    ]  # fmt: skip
    assert len(plan.groups) == 6
    commands = [render_command(group.deployment, "key") for group in plan.groups]
    assert ["--speculative-algorithm" in command for command in commands] == [True, False, True, True, True, True]
    assert "DFLASH" in commands[2] and "--speculative-ddtree-budget" not in commands[2]
    home = job.given.home
    for group in plan.groups:
        path = group.deployment.runtime.env["PYTHONPATH"].split(":")
        assert path == [f"{home}/sglang-edited", f"{home}/plugin", f"{home}/ddtree"]


def test_the_peer_is_asked_on_both_servers(ops, job):
    job.given.engines = ["sglang", "native"]
    ops.peer(job)
    kinds = [load_deployment(job.out / f"{name}.toml") for name in ("sglang", "native")]
    assert all(isinstance(each, Deployment) for each in kinds)
    assert [each.engine.kind for each in kinds] == ["sglang", "native"]
    assert [row["step"] for row in job.steps] == [
        "apply-sglang", "agreement-sglang", "end-sglang", "apply-native", "agreement-native", "end-native",
    ]  # fmt: skip


def test_a_step_that_hangs_leaves_the_next_its_time(ops, tmp_path):
    given = argparse.Namespace(home=tmp_path / "home", out=tmp_path / "out", seconds=100)
    job = ops.Job("some", given, 24000)
    assert not job.step("hangs", ["-c", "import time; time.sleep(60)"], 5)
    assert job.step("next", ["-c", "print('here')"], 30)
    assert not job.step("fails", ["-c", "raise SystemExit(3)"], 30)
    told = json.loads((tmp_path / "out" / "some" / "steps.json").read_text())
    assert [row["state"] for row in told] == ["out of time", "done", "ended with 3"]
    assert not job.end()


def test_steps_get_nothing_of_the_caller_that_would_come_to_stand_in_a_kit(ops, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_NAME_OF_THIS_MACHINE", "secret place")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    given = argparse.Namespace(home=tmp_path / "home", out=tmp_path / "out", seconds=100)
    job = ops.Job("some", given, 24000)
    job.step("told", ["-c", "import os; print(dict(os.environ))"], 30)
    told = (job.out / "told.log").read_text()
    assert "SOME_NAME" not in told and "'CUDA_VISIBLE_DEVICES': '3'" in told


def test_each_case_of_the_pages_has_its_server(ops, tmp_path):
    import record_sglang_pages as pages

    given = argparse.Namespace(home=tmp_path, only=None, device="cuda", sglang_flags="", port=21000)
    run = pages.Recording(given)
    lines = {name: run._server(name, 1).arguments for name in {case.server for case in pages.CASES}}
    assert set(lines) == {*pages.SGLANG_SERVERS, *pages.NATIVE_SERVERS}

    def value(name, flag):
        return lines[name][lines[name].index(flag) + 1] if flag in lines[name] else None

    drafters = "--speculative-draft-model-path"
    assert (
        value("tree", "--speculative-ddtree-budget") == "16" and value("narrow", "--speculative-ddtree-budget") == "8"
    )
    assert value("chain", "--speculative-algorithm") == "DFLASH" and value("plain", "--speculative-algorithm") is None
    assert value("window", "--speculative-draft-window-size") == "512" and "--disable-cuda-graph" in lines["eager"]
    assert value("random", drafters).endswith("random-drafter") and value("tree", drafters) == str(run.home.drafter)
    assert value("native", "--budget") == value("native_eager", "--budget") == "16"
    named = {case.name for case in pages.CASES if not case.must}
    assert named == {case.name for case in pages.CASES if case.name.endswith("_right")}


def test_a_job_without_its_folders_is_refused():
    script = [sys.executable, str(BENCHMARKS / "ops_h200.py")]
    for given, wanted in ((["prepare"], "--stage"), (["verify"], "--out")):
        done = subprocess.run([*script, *given], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and wanted in done.stderr
