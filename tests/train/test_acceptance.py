"""Tau of a drafter: the engine's own rounds, told by set and draft, and kept beside the weights that they belong to."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from ddtree import Engine, SamplingParams, Speculation
from ddtree.demo import drafter_folder
from ddtree.errors import UserError
from ddtree.train.acceptance import (
    Evaluation,
    EvaluationRequest,
    evaluate_drafter,
    keep_draft_temperature,
    keep_expected_tau,
    read_expected_tau,
)
from pairs import Pair, make_pair
from train.pieces import write_prompts

LETTERS = "abcdefgh"  # all that the pair's small vocabulary has


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("prompts")
    return [
        write_prompts(folder / "short.jsonl", [LETTERS[i : i + 3] for i in range(5)]),
        write_prompts(folder / "long.jsonl", [LETTERS[i:] * 4 for i in range(3)]),
    ]


def request(pair: Pair, prompts: list[Path], **changes: object) -> EvaluationRequest:
    wanted: dict = {"plans": ("chain", 4), "max_new_tokens": 20, "batch": 3, "device": "cpu", "dtype": "float32"}
    return EvaluationRequest(model=pair.target, draft=pair.drafter, prompts=tuple(prompts), **wanted | changes)


def evaluate(pair: Pair, prompts: list[Path], **changes: object) -> Evaluation:
    return evaluate_drafter(request(pair, prompts, **changes), lambda stage, fraction: None)


def test_tau_is_tokens_over_rounds_of_all_answers(pair: Pair, prompts: list[Path]) -> None:
    """Against one prompt at a time."""
    evaluation = evaluate(pair, prompts)
    assert [(row.data_set, row.plan, row.n_prompts) for row in evaluation.rows] == [
        ("short", "chain", 5), ("short", 4, 5), ("long", "chain", 3), ("long", 4, 3),
    ]  # fmt: skip
    engine = Engine.load(pair.target, pair.drafter, device="cpu", dtype="float32")
    for row in evaluation.rows:
        file = next(path for path in prompts if path.stem == row.data_set)
        speculation = Speculation("chain") if row.plan == "chain" else Speculation("tree", budget=row.plan)
        lengths = []
        for line in file.read_text().splitlines():
            chat = [{"role": "user", "content": json.loads(line)["turns"][0]}]
            completion = engine.generate([chat], SamplingParams(max_new_tokens=20), speculation=speculation)[0]
            if completion.stats.rounds:
                lengths.append(completion.stats.accepted_lengths)
        assert (row.tokens, row.rounds) == (sum(map(sum, lengths)), sum(map(len, lengths)))
        assert row.tau == row.tokens / row.rounds > 1
        assert row.tau_per_prompt == pytest.approx(sum(sum(own) / len(own) for own in lengths) / len(lengths))


def test_what_was_measured_is_kept_for_those_weights_only(pair: Pair, prompts: list[Path], tmp_path: Path) -> None:
    evaluation = evaluate(pair, prompts, count=2)
    weights = pair.drafter / "model.safetensors"
    assert evaluation.drafter_sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()
    keep_expected_tau(tmp_path, evaluation)
    told = json.loads((tmp_path / "expected_tau.json").read_text())
    assert told["n_prompts"] == {"short": 2, "long": 2}
    assert told["tau"]["long"] == {str(row.plan): round(row.tau, 6) for row in evaluation.rows[2:]}
    assert "float32, greedy, draft temperature 1, at most 20 new tokens" in told["measured"]
    assert told["draft_temperature"] == evaluation.draft_temperature == 1.0
    (tmp_path / "model.safetensors").write_bytes(weights.read_bytes())
    expected = read_expected_tau(tmp_path)
    assert expected is not None and expected.tau == told["tau"]
    (tmp_path / "model.safetensors").write_bytes(weights.read_bytes() + b"another")
    assert read_expected_tau(tmp_path) is None


def test_a_draft_temperature_is_tried_and_made_the_drafters_own(
    pair: Pair, prompts: list[Path], tmp_path: Path
) -> None:
    tried = evaluate(pair, prompts, draft_temperature=0.3)
    assert tried.draft_temperature == 0.3
    copy = Path(shutil.copytree(pair.drafter, tmp_path / "drafter"))
    keep_draft_temperature(copy, 0.3)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (pair.drafter, copy))
    assert after["dflash_config"] == before["dflash_config"] | {"draft_temperature": 0.3}
    assert after == before | {"dflash_config": after["dflash_config"]}
    own = evaluate(Pair(pair.target, copy), prompts)
    assert own.draft_temperature == 0.3 and own.rows == tried.rows
    chain, tree = ([row.rounds for row in tried.rows if row.plan == plan] for plan in ("chain", 4))
    as_before = evaluate(pair, prompts)
    assert [row.rounds for row in as_before.rows if row.plan == "chain"] == chain, "a chain is no other"
    assert [row.rounds for row in as_before.rows if row.plan == 4] != tree


def test_the_shipped_drafter_has_its_expected_tau() -> None:
    expected = read_expected_tau(drafter_folder())
    assert expected is not None
    assert {"gsm8k_test100", "humaneval", "mt_bench"} <= expected.tau.keys()
    assert all({"chain", "8", "16", "32", "64", "128"} <= set(row) for row in expected.tau.values())


def test_prompts_that_cannot_be_used_are_named(pair: Pair, tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "mixed.jsonl", ["abc", "a" * 300])
    with file.open("ab") as more:
        more.write(b'{"turns": ["\xff"]}\n')
    with pytest.raises(UserError, match=r"mixed.jsonl, row 2: a prompt of 303 tokens, at most 236 fit"):
        evaluate(pair, [file])
    evaluation = evaluate(pair, [file], on_bad_row="skip")
    assert [row.n_prompts for row in evaluation.rows] == [1, 1]
    assert [bad.split(":")[0] for bad in evaluation.bad_rows] == ["mixed.jsonl, row 2", "mixed.jsonl, row 3"]
    useless = write_prompts(tmp_path / "useless.jsonl", ["a" * 300])
    with pytest.raises(UserError, match="useless has no usable prompt"):
        evaluate(pair, [useless], on_bad_row="skip")
    with pytest.raises(UserError, match="two prompt files are called mixed"):
        evaluate(pair, [file, file], on_bad_row="skip")
