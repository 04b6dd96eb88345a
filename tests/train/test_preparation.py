"""A new drafter has the published format; what does not fit is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ddtree.demo import drafter_folder
from ddtree.errors import UserError
from ddtree.models.drafter_config import read_drafter_config
from ddtree.models.target_config import read_target_config
from ddtree.models.tokenizer import Tokenizer
from ddtree.train.new_drafter import choose_mask_token, drafter_config
from ddtree.train.preparation import prepare
from ddtree.train.settings import NewDrafter, TrainSettings, changed_settings, checked_settings
from ddtree.train.trainable_drafter import TrainableDrafter
from tiny_models import edit_config, make_drafter, make_target
from train.markov import make_data, make_markov_target


def test_the_demos_pair_would_be_made_anew_with_the_same_config_and_tensors(target_folder: Path) -> None:
    """The shipped drafter loads in z-lab's code; what has its keys, names and shapes does too."""
    target = read_target_config(target_folder)
    mask = choose_mask_token(Tokenizer(target_folder, target.vocab_size), target)
    made = drafter_config(NewDrafter(), target, target_folder, mask)
    shipped_config = json.loads((drafter_folder() / "config.json").read_text())
    del shipped_config["dflash_config"]["draft_temperature"]  # found once it was trained
    assert made == shipped_config
    drafter = TrainableDrafter(read_drafter_config(drafter_folder(), target), made)
    with safe_open(drafter_folder() / "model.safetensors", "pt") as file:
        shipped = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert {name: list(value.shape) for name, value in drafter.state_dict().items()} == shipped


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_markov_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("text") / "data", target, count=8, answer_tokens=12)


def values(target: Path, text: Path, **changes: Any) -> dict[str, object]:
    return {
        "target": target,
        "data": (text,),
        "drafter": {"layers": 1, "block_size": 4},
        "batch": {"rows": 1, "row_tokens": 32, "anchors_per_row": 4},
        "schedule": {"steps": 1},
        "held_out": {"conversations": 2},
        "dtype": "float32",
        **changes,
    }


def prepared(settings: TrainSettings) -> Any:
    return prepare(settings, "cpu", lambda stage: None)


def test_a_new_drafter_is_shaped_as_told_and_as_its_target_where_nothing_is_told(target: Path, data: Path) -> None:
    shape = {"layers": 2, "block_size": 6, "heads": 6, "kv_heads": 3, "intermediate_size": 20, "tap_layers": (2, 0),
             "mask_token_id": 1, "sliding_window": 9, "is_causal": True}  # fmt: skip
    made = prepared(checked_settings(values(target, data, drafter=shape))).drafter.config
    assert (made.n_layers, made.block_size, made.mask_token_id, made.tap_layers) == (2, 6, 1, (2, 0))
    assert (made.layer.n_heads, made.layer.n_kv_heads, made.layer.head_dim) == (6, 3, 8)
    assert (made.layer.hidden_size, made.layer.intermediate_size) == (32, 20)
    assert made.sliding_windows == (9, 9) and made.is_causal


def test_a_new_drafter_begins_with_the_targets_final_norm_and_follows_its_seed(target: Path, data: Path) -> None:
    one, same, other = (prepared(checked_settings(values(target, data, seed=seed))) for seed in (5, 5, 6))
    assert torch.equal(one.drafter.norm.weight.detach(), one.target.final_norm)
    assert torch.equal(one.drafter.fc.weight, same.drafter.fc.weight)
    assert not torch.equal(one.drafter.fc.weight, other.drafter.fc.weight)
    assert float(one.drafter.fc.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_an_older_drafter_goes_on_with_its_weights(target: Path, data: Path, tmp_path: Path) -> None:
    dflash = {"mask_token_id": 3, "target_layer_ids": [0, 2], "draft_temperature": 0.8}
    old = make_drafter(tmp_path, target, block_size=4, dflash_config=dflash)
    made = prepared(checked_settings(values(target, data, drafter=None, start_from=old)))
    with safe_open(old / "model.safetensors", "pt") as file:
        assert torch.equal(made.drafter.fc.weight.detach(), file.get_tensor("fc.weight"))
    assert made.drafter.config.tap_layers == (0, 2)
    assert "draft_temperature" not in made.drafter.folder_config["dflash_config"], "that was found for other weights"


def test_the_mask_is_a_token_that_text_never_has(tmp_path: Path) -> None:
    named = make_target(tmp_path / "named", "llama")  # its tokenizer has <mask>, token 3
    config = read_target_config(named)
    assert choose_mask_token(Tokenizer(named, config.vocab_size), config) == 3


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"drafter": None}, "give start_from or drafter"),
        ({"schedule": {}}, "schedule: give steps or seconds"),
        ({"schedule": {"steps": 5, "seconds": 3.0}}, "schedule: give steps or seconds"),
        ({"objective": {"distribution": "top_k"}}, "objective: top_k goes with distribution top_k"),
        ({"objective": {"top_k": 4}}, "objective: top_k goes with distribution top_k"),
        ({"objective": {"token_share": 1, "distribution": "argmax"}}, "objective: distribution has no effect"),
        ({"objective": {"head_share": 0}}, "objective.head_share"),
        ({"objective": {"colour": "red"}}, "objective.colour"),
        ({"batch": {"rows": 0}}, "batch.rows"),
        ({"optimization": {"matrix_rate": float("nan")}}, "optimization.matrix_rate"),
        ({"data": ()}, "data"),
        ({"data": (Path("a"), Path("b/../a"))}, "a data folder is given twice"),
        ({"held_out": {"tau_count": 3}}, "held_out: tau_count has no effect without tau_prompts"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    changes: dict[str, Any], cause: str, target: Path, data: Path
) -> None:
    with pytest.raises(UserError) as refused:
        checked_settings(values(target, data, **changes))
    assert str(refused.value).startswith(cause)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"batch": {"row_tokens": 512}}, "rows of 512 tokens are beyond the target's context of 256"),
        ({"batch": {"row_tokens": 64, "anchors_per_row": 64}}, "64 anchors do not fit a row of 64"),
        ({"objective": {"distribution": "top_k", "top_k": 99}}, "top_k 99 is beyond the vocabulary of 61"),
        ({"drafter": {"layers": 5}}, "a target of 4 layers has no 5 to spread"),
        ({"drafter": {"layers": 1, "tap_layers": (3,)}}, "target_layer_ids name the last layer 3"),
        ({"drafter": {"layers": 1, "heads": 3}}, "3 heads cannot share 2 key heads"),
        ({"drafter": {"layers": 1, "mask_token_id": 61}}, "mask_token_id 61 is no token of the target"),
        ({"drafter": {"layers": 1, "tap_layers": (9,)}}, r"^the new drafter's target_layer_ids \[9\]"),
        ({"sliding_block": "causal"}, "no layer has a sliding window"),
        ({"held_out": {"conversations": 8}}, "8 conversations can be trained on, 8 of them"),
    ],
)
def test_settings_that_do_not_fit_the_target_are_refused(
    changes: dict[str, Any], cause: str, target: Path, data: Path
) -> None:
    with pytest.raises(UserError, match=cause):
        prepared(checked_settings(values(target, data, **changes)))


def test_text_of_another_tokenizer_is_refused_by_file(data: Path, tmp_path: Path) -> None:
    other = make_markov_target(tmp_path)
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"<mask>"', '"<cover>"'))
    with pytest.raises(UserError, match=r"data\.json was written by .* tokenizer_sha256"):
        prepared(checked_settings(values(other, data)))


def test_text_of_another_model_is_refused_by_file(target: Path, data: Path, tmp_path: Path) -> None:
    other = edit_config(make_markov_target(tmp_path), rms_norm_eps=1e-3)
    with pytest.raises(UserError, match=r"data\.json was written by .* config_sha256"):
        prepared(checked_settings(values(other, data)))


def test_prompts_for_tau_are_read_before_anything_is_trained(target: Path, data: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["abc"]}\n{"turns": []}\n')
    looks = {"conversations": 2, "tau_prompts": (prompts,)}
    with pytest.raises(UserError, match=r"prompts\.jsonl, row 2"):
        prepared(checked_settings(values(target, data, held_out=looks)))


def test_changes_of_settings_are_told_by_name(target: Path, data: Path) -> None:
    one = checked_settings(values(target, data))
    other = checked_settings(values(target, data, seed=4, objective={"decay_tokens": 7}))
    assert changed_settings(one, one) == []
    assert changed_settings(one, other) == ["objective.decay_tokens", "seed"]
