"""A run that was killed, stopped or out of disk goes on as if nothing had been."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cli.command import ddtree, is_one_line_for_the_user
from ddtree.cli.main import run
from ddtree.train.checkpoint import CHECKPOINT, read_checkpoint
from ddtree.train.run_log import CsvLog
from train.markov import make_data, make_markov_target

STEPS = 30


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_markov_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("text") / "data", target, count=40, answer_tokens=24)


@pytest.fixture(scope="module")
def words(target: Path, data: Path) -> list[str]:
    """A small run, without where it goes."""
    return [
        "train", "run", "--model", str(target), "--data", str(data), "--layers", "2", "--block-size", "4",
        "--taps", "0,2", "--rows", "2", "--row-tokens", "64", "--anchors", "12", "--held-out", "4",
        "--steps", str(STEPS), "--device", "cpu", "--dtype", "float32", "--threads", "1",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert ddtree(*words, "--out", str(folder)).returncode == 0
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = read_checkpoint(folder, torch.device("cpu"))
    assert checkpoint is not None and checkpoint.step == STEPS
    return checkpoint.drafter


def same_run(one: Path, other: Path) -> bool:
    """Weights to the last bit, and the exported drafter's too."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (one / "drafter/model.safetensors").read_bytes() == (other / "drafter/model.safetensors").read_bytes()
    return True


def test_killed_runs_come_to_the_same_weights_bit_for_bit(words: list[str], whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "ddtree", *words, "--out", str(folder), "--resume", "--look-every", "1",
               "--checkpoint-every", "0.001"]  # fmt: skip
    killed_at = 0
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 120
            while step_of(folder) < killed_at + 5 and process.poll() is None and time.monotonic() < until:
                time.sleep(0.002)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"
        assert killed_at < step_of(folder) < STEPS
        killed_at = step_of(folder)
    assert subprocess.run(command, capture_output=True, timeout=280, check=False).returncode == 0
    assert same_run(folder, whole)
    steps = [int(line.split(",")[0]) for line in (folder / "log.csv").read_text().splitlines()[1:]]
    assert steps == sorted(set(steps)), "the log tells a step twice"


def step_of(folder: Path) -> int:
    checkpoint = read_checkpoint(folder, torch.device("cpu"))
    return checkpoint.step if checkpoint else 0


def test_pieces_by_the_clock_come_to_the_same_weights(words: list[str], whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    piece = ddtree(*words, "--out", str(folder), "--stop-after", "0.001")
    assert piece.returncode == 0
    assert "stopped; go on with --resume" in piece.stderr
    assert (folder / "drafter/model.safetensors").exists()
    assert is_one_line_for_the_user(ddtree(*words, "--out", str(folder)), "holds a run already", "--resume")
    assert ddtree(*words, "--out", str(folder), "--resume").returncode == 0
    assert same_run(folder, whole)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_run_in_one_line_and_it_goes_on(words: list[str], whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert ddtree(*words, "--out", str(folder), "--stop-after", "0.001").returncode == 0
    before = (folder / CHECKPOINT).read_bytes()
    (folder / (CHECKPOINT + ".unfinished")).symlink_to("/dev/full")
    result = ddtree(*words, "--out", str(folder), "--resume", "--checkpoint-every", "0.001")
    assert is_one_line_for_the_user(result, "no space left for", CHECKPOINT)
    assert (folder / CHECKPOINT).read_bytes() == before
    assert ddtree(*words, "--out", str(folder), "--resume").returncode == 0
    assert same_run(folder, whole)


def test_ctrl_c_keeps_what_is_done(words: list[str], whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "ddtree", *words, "--out", str(folder), "--resume", "--look-every", "1",
               "--checkpoint-every", "0.001"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (folder / CHECKPOINT).exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert 0 < step_of(folder) < STEPS
    assert subprocess.run(command, capture_output=True, timeout=280, check=False).returncode == 0
    assert same_run(folder, whole)


def test_two_processes_learn_what_one_does_with_twice_the_accumulation(words: list[str], tmp_path: Path) -> None:
    few = [*words, "--steps", "6"]
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert ddtree(*few, "--accumulation", "2", "--out", str(alone)).returncode == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port),
         "-m", "ddtree", *few, "--out", str(together)],
        capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert both.returncode == 0, both.stderr
    one, two = (read_checkpoint(folder, torch.device("cpu")) for folder in (alone, together))
    assert one is not None and two is not None and one.step == two.step == 6
    for name, value in one.drafter.items():
        torch.testing.assert_close(two.drafter[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (["--matrix-rate", "0.001"], "optimization.matrix_rate"),
        (["--seed", "3"], "seed"),
        (["--steps", "40"], "schedule.steps"),
    ],
)
def test_a_run_does_not_go_on_with_other_settings(words: list[str], whole: Path, flags: list[str], cause: str) -> None:
    result = ddtree(*words, *flags, "--out", str(whole), "--resume")
    assert is_one_line_for_the_user(result, "has other settings", cause)


@pytest.fixture(scope="module")
def begun(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its first step."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    assert ddtree(*words, "--out", str(folder), "--stop-after", "0.001").returncode == 0
    return folder


def test_a_cut_checkpoint_is_named(words: list[str], begun: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(begun, tmp_path / "run"))
    path = folder / CHECKPOINT
    path.write_bytes(path.read_bytes()[:1000])
    assert is_one_line_for_the_user(ddtree(*words, "--out", str(folder), "--resume"), str(path), "cannot be read")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"optimizer": None}, "is damaged"),
        ({"step": -5}, "is damaged"),
        ({"train_s": float("nan")}, "is damaged"),
        ({"optimizer": {}}, "does not fit this run"),
        ({"optimizer.muon": [torch.zeros(1)]}, "does not fit this run"),
        ({"drafter": {"fc.weight": torch.zeros(1)}}, "does not fit this run"),
    ],
)
def test_the_checkpoint_of_another_run_is_named(
    changes: dict[str, object], cause: str, words: list[str], begun: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = Path(shutil.copytree(begun, tmp_path / "run"))
    fields = torch.load(folder / CHECKPOINT, weights_only=True)
    for name, value in changes.items():
        outer, _, inner = name.partition(".")
        (fields[outer] if inner else fields)[inner or outer] = value
    torch.save(fields, folder / CHECKPOINT)
    assert run([*words, "--out", str(folder), "--resume"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert CHECKPOINT in told and cause in told


def test_half_a_row_of_a_log_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"step,loss\n1,0.5\n2,0.4\n\xff,1\n1,0.")
    CsvLog(path, ["step", "loss"], 2)
    assert path.read_text() == "step,loss\n1,0.5\n2,0.4\n"
