"""The verbs with the real target and drafter, as separate processes: what comes out, and where."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import ddtree, is_one_line_for_the_user

from ddtree.demo import drafter_folder, target_folder
from tiny_models import make_target

SMALL = ("--dtype", "float32", "--max-model-len", "512")
PROMPT = "Why is the sky blue?"
FIELDS = {
    *("text", "token_ids", "finish_reason", "usage", "mode", "budget", "tau", "accepted_lengths", "rounds"),
    *("decode_tok_s", "ttft_ms", "notes", "prompt_index", "turn"),
}


def objects(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr and "Warning" not in result.stderr, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module", autouse=True)
def cached_target() -> Path:
    return target_folder()


def test_all_modes_give_one_text_as_json() -> None:
    answers = {}
    for mode, size in (("ar", ()), ("chain", ()), ("tree", ("--budget", "8", "--top-k-cap", "4"))):
        command = ("generate", "--json", "--prompt", PROMPT, "--max-new-tokens", "16", "--mode", mode, *size)
        (answers[mode],) = objects(ddtree(*command, *SMALL))
    for mode, answer in answers.items():
        assert answer.keys() == FIELDS
        assert answer["mode"] == mode
        assert answer["text"] == answers["ar"]["text"] and answer["token_ids"] == answers["ar"]["token_ids"]
        usage = answer["usage"]
        assert usage["completion_tokens"] == len(answer["token_ids"]) == 16
        assert usage["total_tokens"] == usage["prompt_tokens"] + 16
        assert len(answer["accepted_lengths"]) == answer["rounds"]
        assert answer["finish_reason"] == "length"
    assert answers["tree"]["budget"] == 8
    assert answers["tree"]["rounds"] < answers["ar"]["rounds"]


def test_a_file_of_conversations(tmp_path: Path) -> None:
    """Each turn is answered with the answers before it in view; answers come batch by batch, in the file's order."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["My name is Ada.", "What is my name?"]}\n{"turns": ["Count to three."]}\n')
    result = ddtree("generate", "--json", "--prompts", str(file), "--max-new-tokens", "8", "--max-batch", "2", *SMALL)
    rows = objects(result)
    assert [(row["prompt_index"], row["turn"]) for row in rows] == [(0, 0), (1, 0), (0, 1)]
    assert rows[2]["usage"]["prompt_tokens"] > rows[0]["usage"]["total_tokens"]


def test_text_goes_to_stdout_and_figures_to_stderr() -> None:
    command = ("generate", "--no-chat", "--prompt", "The capital of France is", "--max-new-tokens", "4", *SMALL)
    result = ddtree(*command)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout and len(result.stdout.splitlines()) <= 3
    assert re.search(r"\[4 tokens, cut at the limit; [\d.]+ tok/s; tree, budget auto, tau [\d.]+\]", result.stderr)


def test_sampling_flags_reach_the_engine() -> None:
    base = ("generate", "--json", "--prompt", PROMPT, "--temperature", "1.5", "--seed", "1", *SMALL)
    (sampled,) = objects(ddtree(*base, "--max-new-tokens", "8"))
    (narrow,) = objects(ddtree(*base, "--max-new-tokens", "24", "--top-k", "1", "--stop", "blue"))
    assert narrow["finish_reason"] == "stop" and narrow["text"].endswith("The sky appears ")
    assert sampled["text"][:10] != narrow["text"][:10]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "no/such/folder"), ("no/such/folder",)),
        (("--model", "."), ("config.json",)),
        (("--draft", "no/such/folder"), ("no/such/folder",)),
        (("--budget", "0"), ("budget",)),
        (("--budget", "1025"), ("1024",)),
        (("--temperature", "nan"), ("temperature",)),
        (("--max-new-tokens", "0"), ("max_new_tokens",)),
        (("--memory-fraction", "0"), ("memory_fraction",)),
        (("--device", "abacus"), ("abacus",)),
        (("--block-size", "999"), ("block",)),
        (("--max-model-len", "4"), ("4",)),
        (("--max-model-len", "10000000"), ("10000000",)),
    ],
)
def test_what_the_engine_refuses_is_one_line(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert is_one_line_for_the_user(ddtree("generate", "--prompt", PROMPT, *arguments), *words)


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    shutil.copytree(drafter_folder(), tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["hidden_size"] = 64
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    assert is_one_line_for_the_user(ddtree("generate", "--prompt", PROMPT, "--draft", str(tmp_path / "other")))


def test_the_demos_drafter_for_another_target(tmp_path: Path) -> None:
    result = ddtree("demo", "--model", str(make_target(tmp_path / "other", "llama")))
    assert is_one_line_for_the_user(result, "the drafter shipped with ddtree does not fit", "--draft DIR")
    result = ddtree("demo", "--model", str(tmp_path / ("x" * 300)))
    assert is_one_line_for_the_user(result, "cannot be read (File name too long)")


@pytest.mark.skipif(sys.platform == "darwin", reason="bytes of arguments are kept on Linux only")
def test_bytes_that_are_no_text() -> None:
    for command, text in ((["generate", "--prompt", b"\xff"], b""), (["chat", *SMALL], b"hi\xff\n")):
        result = subprocess.run(
            [sys.executable, "-m", "ddtree", *command], input=text, capture_output=True, timeout=280, check=False
        )
        told = subprocess.CompletedProcess([], result.returncode, result.stdout.decode(), result.stderr.decode())
        assert is_one_line_for_the_user(told, "is not valid Unicode text")


def test_chat_remembers_and_forgets() -> None:
    result = ddtree("chat", "--max-new-tokens", "6", *SMALL, text="My name is Ada.\n\n/new\nHello\n/exit\nnot asked\n")
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"\[\d+ tokens", result.stderr)) == 2
    assert "Traceback" not in result.stderr and result.stdout.strip()


def test_a_reader_that_goes_away_ends_the_run_quietly() -> None:
    arguments = ["generate", "--prompt", PROMPT, "--prompt", "Hi", "--max-new-tokens", "2", "--max-batch", "1", *SMALL]
    process = subprocess.Popen(
        [sys.executable, "-m", "ddtree", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    )
    assert process.stdout and process.stderr
    process.stdout.close()
    complaint = process.stderr.read().decode()
    assert process.wait(timeout=200) == 141
    assert "Traceback" not in complaint and "BrokenPipe" not in complaint


def test_demo_as_json() -> None:
    (demo,) = objects(ddtree("demo", "--json", "--dtype", "float32", "--max-new-tokens", "12", "--budget", "8"))
    assert [row["mode"] for row in demo["modes"]] == ["ar", "chain", "tree"]
    assert [row["same_text"]["verdict"] for row in demo["modes"]] == ["same"] * 3
    assert demo["modes"][0]["tau"] == 1 and demo["modes"][0]["speed_against_ar"] == 1
    assert demo["modes"][2]["tau"] > 1 and demo["modes"][2]["budget"] == 8
    assert len(demo["prompts"]) == 3 and all(prompt["text"] for prompt in demo["prompts"])
    assert 0 < len(demo["tree"]["nodes"]) <= 8


def test_demo_for_a_person() -> None:
    result = ddtree("demo", "--dtype", "float32", "--max-new-tokens", "8")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^tree 16 +[\d.]+ +[\d.]+ +[\d.]+x +yes", result.stdout, re.M)
    assert "● " in result.stdout and "★ " in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 60
