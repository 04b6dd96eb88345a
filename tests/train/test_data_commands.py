"""`ddtree train data` and `ddtree train evaluate` as a person runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.command import ddtree, is_one_line_for_the_user
from ddtree.cli.main import run
from ddtree.train.shards import read_facts
from pairs import make_pair
from train.pieces import letters, small_request, write_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    small_request(folder)
    return folder


def data(folder: Path, *more: str, out: str = "data") -> tuple[str, ...]:
    """A small `train data` command."""
    return (
        "train", "data", "--model", str(folder / "target"), "--out", str(folder / out), "--tokens", "300",
        "--max-prompt", "40", "--max-answer", "24", "--shard", "8", "--batch", "4", "--dtype", "float32", *more,
    )  # fmt: skip


def test_data_tells_what_it_made(folder: Path) -> None:
    prompts = ("--prompts", f"{folder / 'first.jsonl'}:3", "--prompts", str(folder / "second.jsonl"))
    stopped = ddtree(*data(folder, *prompts, "--stop-after", "0.000001"))
    assert stopped.returncode == 0 and "300 answer tokens are missing" in stopped.stderr
    done = ddtree(*data(folder, *prompts))
    assert done.returncode == 0, done.stderr
    facts = read_facts(folder / "data")
    assert facts.is_finished and [file.weight for file in facts.asked.prompts] == [3.0, 1.0]
    assert f"{facts.n_conversations} conversations" in done.stdout
    assert f"{facts.n_answer_tokens} of answers" in done.stdout
    assert f"from first, completed by the target: {facts.n_by_source['first, completed by the target']}" in done.stdout
    again = ddtree(*data(folder, *prompts, "--json"))
    told = json.loads(again.stdout)
    assert told["answer_tokens"] == facts.n_answer_tokens and told["new_answer_tokens"] == 0


def test_bad_rows_are_named_and_skipped_or_refused(folder: Path) -> None:
    prompts = write_prompts(folder / "mixed.jsonl", [letters(1), "a" * 90])
    refused = ddtree(*data(folder, "--prompts", str(prompts), out="mixed"))
    assert is_one_line_for_the_user(refused, "mixed.jsonl, row 2: a prompt of", "--on-bad-row skip")
    assert not (folder / "mixed").exists()
    skipped = ddtree(*data(folder, "--prompts", str(prompts), "--on-bad-row", "skip", out="mixed"))
    assert skipped.returncode == 0, skipped.stderr
    assert "left out bad row: 1" in skipped.stdout and "skipped mixed.jsonl, row 2" in skipped.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prompts", "first.jsonl:heavy"), ("no weight", "FILE:WEIGHT")),
        (("--prompts", "nowhere.jsonl"), ("cannot read nowhere.jsonl",)),
        (("--prompts", "{folder}/first.jsonl:0"), ("the weight of", "is 0.0")),
        (("--prompts", "{folder}/first.jsonl", "--loops", "forget"), ("--loops", "forget")),
        (("--prompts", "{folder}/first.jsonl", "--greedy-share", "2"), ("--greedy-share is 2.0",)),
        (("--prompts", "{folder}/first.jsonl", "--exclude", "nowhere.jsonl"), ("cannot read nowhere.jsonl",)),
        (("--prompts", "{folder}/first.jsonl", "--max-answer", "1000"), ("context of 256", "--max-answer")),
        (("--prompts", "{folder}/first.jsonl", "--allow", "Think."), ("--allow without --exclude",)),
    ],
)
def test_wrong_flags_get_one_line(
    folder: Path, flags: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [flag.format(folder=folder) for flag in flags]
    assert run(data(folder, *given, out="wrong")) == 2
    told = capsys.readouterr()
    assert not told.out and all(word in told.err.splitlines()[-1] for word in words), told.err
    assert not (folder / "wrong").exists()


def test_evaluate_prints_a_table_and_keeps_it(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    prompts = write_prompts(tmp_path / "exam.jsonl", ["abc", "cde", "efg"])
    command = (
        "train", "evaluate", "--model", str(pair.target), "--draft", str(pair.drafter), "--prompts", str(prompts),
        "--budgets", "chain,4", "--max-new-tokens", "20", "--dtype", "float32", "--count", "2",
    )  # fmt: skip
    done = ddtree(*command, "--keep")
    assert done.returncode == 0, done.stderr
    head, row = (line.split() for line in done.stdout.splitlines())
    assert head == ["prompts", "number", "chain", "4"]
    tau = json.loads((pair.drafter / "expected_tau.json").read_text())["tau"]["exam"]
    assert row == ["exam", "2", f"{tau['chain']:.2f}", f"{tau['4']:.2f}"]
    told = json.loads(ddtree(*command, "--json").stdout)
    assert told["tau"] == pytest.approx([tau["chain"], tau["4"]], abs=1e-4)
    assert is_one_line_for_the_user(ddtree(*command, "--budgets", "chain,many"), "--budgets names 'many'")
    config = pair.drafter / "config.json"
    for wrong in ("nan", "0.05", "cold"):
        assert is_one_line_for_the_user(ddtree(*command, "--keep", "--draft-temperature", wrong), "temperature")
    assert "draft_temperature" not in config.read_text()
    chain = ddtree(*command, "--keep", "--budgets", "chain", "--draft-temperature", "0.5")
    assert is_one_line_for_the_user(chain, "--draft-temperature does not apply to a chain")
    assert "draft_temperature" not in config.read_text()
    done = ddtree(*command, "--keep", "--draft-temperature", "0.5")
    assert done.returncode == 0 and "draft temperature 0.5" in done.stderr
    assert json.loads(config.read_text())["dflash_config"]["draft_temperature"] == 0.5


def test_the_installed_demo_keeps_its_own_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(("train", "evaluate", "--prompts", "nowhere.jsonl", "--keep")) == 2
    assert "--keep would change the installed demo" in capsys.readouterr().err
