"""A drafter's card says what was done and measured, and nothing else."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from ddtree.demo import drafter_folder
from ddtree.errors import UserError
from ddtree.train.acceptance import EvaluationRequest, evaluate_drafter, keep_expected_tau
from ddtree.train.card import rewrite_card, write_card
from ddtree.train.card_facts import CardFacts, RunFacts, read_card_facts
from ddtree.train.data_facts import DataFacts, EvaluationFile, ShardFacts
from pairs import Pair, make_pair
from tiny_models import load_weights
from train.pieces import write_prompts
from train.test_shards import ASKED, TARGET

DATA = DataFacts(
    target=TARGET,
    asked=ASKED.model_copy(
        update={
            "excluded": [EvaluationFile(name="exam.jsonl", sha256="4" * 64, n_rows=40)],
            "allowed": ["Think first."],
        }
    ),
    sources=["sums", "sums, completed by the target"],
    shards=[
        ShardFacts(
            n_draws=500, n_conversations=400, n_greedy=300, n_tokens=90_000, n_answer_tokens=61_234,
            n_by_source={"sums": 100, "sums, completed by the target": 300}, n_cut=17, n_left_out={"loop": 83},
        )
    ],
    n_evaluation_prompts=5,
    is_finished=True,
)  # fmt: skip


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path)


def facts_of(pair: Pair, **changes: object) -> CardFacts:
    weights = (pair.drafter / "model.safetensors").read_bytes()
    facts = CardFacts(
        name="tiny-dflash",
        target=TARGET,
        licence="apache-2.0",
        base_model="somebody/tiny",
        weights_sha256=hashlib.sha256(weights).hexdigest(),
        data=[DATA],
        settings={"optimization.matrix_rate": 0.005, "batch.rows": 1, "compile": True, "objective.top_k": None},
        run=RunFacts(
            steps=1234,
            anchors=56_789,
            seconds=987.6,
            device="CPU",
            start="normal(0, 0.02)",
            versions={"torch": "9.9"},
            held_out_loss=1.2345,
            held_out_hits=[0.75, 0.5],
        ),
    )
    return facts.model_copy(update=changes)


def cells(card: str) -> dict[str, list[str]]:
    """Rows of all tables by their first cell."""
    rows = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


def test_names_of_others_begin_no_line(pair: Pair) -> None:
    stranger = DATA.model_copy(update={"target": TARGET.model_copy(update={"name": "x\n# forged\x1b[31m"})})
    write_card(pair.drafter, facts_of(pair, data=[stranger], licence="mit\nforged: yes"))
    text = (pair.drafter / "README.md").read_text()
    assert "forged" in text and "\x1b" not in text
    assert not any(line.startswith(("# forged", "forged")) for line in text.splitlines())


def test_a_config_that_leaves_things_to_the_format_has_a_card(pair: Pair) -> None:
    path = pair.drafter / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"]["block_size"] = config.pop("block_size")
    for name in ("head_dim", "num_key_value_heads"):
        del config[name]
    del config["dflash_config"]["target_layer_ids"]
    path.write_text(json.dumps(config))
    write_card(pair.drafter, facts_of(pair))
    told = cells((pair.drafter / "README.md").read_text())
    assert told["target features"] == ["output of target layers that are spread evenly"]
    assert told["layers"][0].endswith("head size 128")


def test_every_fact_is_told(pair: Pair) -> None:
    write_card(pair.drafter, facts_of(pair))
    card = (pair.drafter / "README.md").read_text()
    front = yaml.safe_load(re.match(r"---\n(.*?)---\n", card, re.S)[1])
    assert front["license"] == "apache-2.0" and front["base_model"] == "somebody/tiny"
    assert "dflash" in front["tags"]
    table = cells(card)
    n_parameters = sum(tensor.numel() for tensor in load_weights(pair.drafter).values())
    assert table["parameters"][0].startswith(f"{n_parameters:,} in float32")
    assert table["block size"] == ["8 (one known token and 7 mask tokens)"]
    assert table["target features"] == ["output of target layers 0, 2 (counted from 0)"]
    assert table["sums, completed by the target"] == ["300", "75%"]
    assert table["optimization.matrix_rate"] == ["0.005"] and table["batch.rows"] == ["1"]
    assert table["compile"] == ["yes"] and table["objective.top_k"] == ["none"]
    for told in (
        "400 conversations of 90,000 tokens", "61,234 answer tokens, 75% of the conversations with greedy",
        "left out, loop: 83", "go round in circles: 17", "`exam.jsonl` (40 prompts)", "Think first.",
        "5 given prompts", "1,234 steps, 56,789 blocks, 988 seconds on CPU", "normal(0, 0.02)", "torch 9.9",
        "1.2345", "0.75 0.50", "Not measured yet",
    ):  # fmt: skip
        assert told in card, told


def test_without_a_licence_none_is_claimed(pair: Pair) -> None:
    write_card(pair.drafter, facts_of(pair, licence=None, base_model=None))
    card = (pair.drafter / "README.md").read_text()
    front = yaml.safe_load(re.match(r"---\n(.*?)---\n", card, re.S)[1])
    assert "license" not in front and "base_model" not in front
    assert cells(card)["licence"] == ["none was stated"]


def test_an_evaluation_is_added_to_the_card(pair: Pair, tmp_path: Path) -> None:
    write_card(pair.drafter, facts_of(pair))
    prompts = write_prompts(tmp_path / "exam.jsonl", ["abc", "de"])
    evaluation = evaluate_drafter(
        EvaluationRequest(
            model=pair.target, draft=pair.drafter, prompts=(prompts,), plans=("chain", 4), max_new_tokens=20,
            device="cpu", dtype="float32",
        ),
        lambda stage, fraction: None,
    )  # fmt: skip
    keep_expected_tau(pair.drafter, evaluation)
    assert rewrite_card(pair.drafter)
    card = (pair.drafter / "README.md").read_text()
    assert cells(card)["exam"] == ["2", *(f"{row.tau:.2f}" for row in evaluation.rows)]
    assert "Not measured yet" not in card and "at most 20 new tokens" in card
    assert read_card_facts(pair.drafter) == facts_of(pair)


def test_facts_of_other_weights_are_refused(pair: Pair) -> None:
    with pytest.raises(UserError, match="the facts are those of weights 000000000000"):
        write_card(pair.drafter, facts_of(pair, weights_sha256="0" * 64))
    assert not (pair.drafter / "README.md").exists()


def test_a_drafter_without_facts_keeps_its_card(pair: Pair) -> None:
    (pair.drafter / "README.md").write_text("mine")
    assert not rewrite_card(pair.drafter)
    assert (pair.drafter / "README.md").read_text() == "mine"


def test_damaged_facts_are_named(pair: Pair) -> None:
    (pair.drafter / "training.json").write_text('{"name": 3}')
    with pytest.raises(UserError, match=r"training.json is damaged \(name"):
        rewrite_card(pair.drafter)


def test_the_shipped_card_is_of_the_shipped_weights(tmp_path: Path) -> None:
    folder = shutil.copytree(drafter_folder(), tmp_path / "drafter")
    card = (folder / "README.md").read_text()
    sha256 = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert f"`{sha256}`" in card
    n_parameters = sum(tensor.numel() for tensor in load_weights(folder).values())
    assert f"{n_parameters:,} in bfloat16" in card
    if rewrite_card(folder):  # its facts are shipped too
        assert (folder / "README.md").read_text() == card
