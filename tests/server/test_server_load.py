"""The load benchmark runs from end to end, on a tiny pair, and writes what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "server_load.py"


def run(folders, prompts: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, SCRIPT, "--target", folders[0], "--drafter", folders[1], "--prompts", prompts, "--out", out,
        "--device", "cpu", "--dtype", "float32", "--max-model-len", "128", "--threads", "1", *more,
    ]  # fmt: skip
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=280, check=False)


def test_both_pieces(tiny_folders, tmp_path):
    (tmp_path / "prompts").mkdir()
    lines = [json.dumps({"turns": [f"question {name}"]}) for name in "abc"]
    (tmp_path / "prompts" / "some.jsonl").write_text("\n".join(lines) + "\n")
    small = ("--concurrency", "1,3", "--modes", "ar,tree8", "--max-tokens", "12", "--repeats", "1", "--count", "3")
    done = run(tiny_folders, tmp_path / "prompts", tmp_path / "out", *small, "--overhead-prompts", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    load = json.loads((tmp_path / "out" / "server_load.json").read_text())
    assert [(p["mode"], p["concurrency"]) for p in load["points"]] == [
        *(("tree8", 1), ("ar", 1), ("tree8", 3), ("ar", 3)),
    ]
    for point in load["points"]:
        assert point["requests"] == 8 and point["failed"] == 0 and point["tokens"] == 8 * 12
        assert point["tok_s"] > 0 and 0 < point["ttft_ms_p50"] <= point["ttft_ms_p99"]
        assert 0 < point["client_busy"] < 1
        assert point["tau"] == 1 if point["mode"] == "ar" else 1 <= point["tau"] <= 6
    assert load["server"]["effective"]["engine"]["prefix_cache"] is None
    overhead = json.loads((tmp_path / "out" / "server_overhead.json").read_text())
    assert [row["mode"] for row in overhead["table"]] == ["ar", "tree8"]
    assert all(row["same_token_counts"] == row["answers"] == 2 for row in overhead["table"])
    assert str(tmp_path) not in json.dumps([load, overhead]), "no folders of the machine"


def test_a_folder_without_prompts(tiny_folders, tmp_path):
    done = run(tiny_folders, tmp_path, tmp_path / "out")
    assert done.returncode == 1 and "has no .jsonl files" in done.stderr
