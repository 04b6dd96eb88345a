"""The benchmark with a simulated GPU runs from end to end and tells what it says it tells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "server_simulated.py"
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="CPU times of threads are read from /proc"
)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=280, check=False)


def test_two_sources_in_turn(tiny_folders, tmp_path):
    out = tmp_path / "told.json"
    done = run(
        "--target", tiny_folders[0], "--out", out, "--before", SCRIPT.parents[1] / "src", "--max-tokens", 24,
        "--pieces", "overhead,streams", "--repeats", 1, "--answers", 3, "--concurrency", "1,4",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(out.read_text())
    assert list(told["streams"]) == ["1", "4"] and "bound" not in told
    for each in told["streams"].values():
        assert set(each) == {"before", "now", "bare"}
        for name in ("before", "now"):
            row = each[name]["median"]
            assert row["tok_s"] > 0 and row["whole_tok_s"] > 0 and 0 < row["ttft_ms_p50"] <= row["ttft_ms_p99"]
            assert row["rounds"] * 5 > 24 * 23 and row["chunks"] <= row["rounds"] + 24
            assert row["loop_us_a_request"] > 0 and row["engine_us_a_round"] > 60, "a launch alone takes 60 us"
            assert 0 < row["client_busy"] < 1
    assert set(told["overhead"]["table"]) == {"before whole", "before streamed", "now whole", "now streamed"}
    assert len(told["overhead"]["rows"]) == 3
    assert str(tmp_path) not in json.dumps(told), "no folders of the machine"


def test_a_piece_that_does_not_exist(tmp_path):
    done = run("--target", tmp_path, "--out", tmp_path / "x", "--pieces", "stream")
    assert done.returncode == 2 and "no piece stream: choose of" in done.stderr
