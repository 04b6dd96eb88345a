"""What is wrong with a drafter folder, or does not fit the target, is refused at load, by name and with a remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree.errors import UserError
from ddtree.models.drafter import load_drafter
from ddtree.models.drafter_config import default_tap_layers, read_drafter_config
from ddtree.models.target import Target, load_target
from ddtree.models.target_config import read_target_config
from tiny_models import edit_config, load_weights, make_drafter, make_target, read_config, save_weights

N_LAYERS = 6
OTHER = "this drafter was made for another target"


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("x") / "target", "llama", num_hidden_layers=N_LAYERS)


@pytest.fixture(scope="module")
def target(target_path: Path) -> Target:
    return load_target(target_path, torch.float32, torch.device("cpu"))


@pytest.fixture
def folder(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that a test may damage; its path does not hold the test's name, which messages repeat."""
    return make_drafter(tmp_path_factory.mktemp("x") / "drafter", target_path, taps=[1, 3])


def assert_refused(folder: Path, target: Target, cause: str, **options: Any) -> None:
    with pytest.raises(UserError, match=cause) as caught:
        load_drafter(folder, target, **options)
    assert caught.value.remedy, "no remedy"


def test_a_whole_drafter_loads(folder: Path, target: Target) -> None:
    config = load_drafter(folder, target).config
    assert (config.block_size, config.mask_token_id, config.tap_layers) == (8, 3, (1, 3))
    assert config.draft_temperature == 1.0


def test_no_drafter(folder: Path, target: Target, target_path: Path) -> None:
    assert_refused(folder / "absent", target, "there is no drafter folder")
    assert_refused(target_path, target, r"architectures \['LlamaForCausalLM'\] is not DFlashDraftModel")
    (folder / "config.json").unlink()
    assert_refused(folder, target, "is not a drafter: it has no config.json")


@pytest.mark.parametrize("content", ["", '{"block', "[]"])
def test_broken_json(folder: Path, target: Target, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert_refused(folder, target, r"config.json (cannot be read as JSON|holds no JSON object)")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"architectures": []}, r"architectures \[\] is not DFlashDraftModel"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "is not DFlashDraftModel"),
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"vocab_size": 64}, f"vocab_size 64, the target has 61: {OTHER}"),  # padded
        ({"vocab_size": 32}, f"vocab_size 32, the target has 61: {OTHER}"),  # pruned
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": 48}, f"hidden_size 48, the target has 32: {OTHER}"),
        ({"num_target_layers": 5}, f"num_target_layers 5, the target has 6: {OTHER}"),
        ({"num_target_layers": "6"}, "num_target_layers is '6', not int"),
        ({"num_target_layers": 0}, f"num_target_layers 0, the target has 6: {OTHER}"),
        *(({"rms_norm_eps": value}, "rms_norm_eps is ") for value in (0, 1, float("nan"), float("inf"), 10**400)),
        *(({"rope_theta": value}, "rope_theta is ") for value in (0, -1.0, 0.5, float("nan"), float("inf"), 10**400)),
        *(
            ({"dflash_config": {"mask_token_id": 3, "draft_temperature": value}}, "dflash_config.draft_temperature is ")
            for value in (0, 0.05, 11, -1.0, float("nan"), True, "1", [0.8])
        ),
        ({"block_size": None}, "block_size is missing"),
        ({"block_size": 1}, "block_size 1 is out of range"),
        ({"block_size": 65}, "block_size 65 is out of range"),
        ({"block_size": "8"}, "block_size is '8', not int"),
        ({"is_causal": "no"}, "is_causal is 'no', not bool"),
        ({"anchor_tokens": 4, "use_gate": True}, "anchor_tokens, use_gate would be ignored"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types must give"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types asks for sliding_attention, but"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "rope_type 'su' is not known"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"the weights are quantised \(fp8\)"),
        ({"dflash_config": [1]}, r"dflash_config is \[1\], not dict"),
    ],
    ids=lambda value: "" if isinstance(value, str) else json.dumps(value),
)
def test_config_values(folder: Path, target: Target, changes: dict[str, Any], cause: str) -> None:
    assert_refused(edit_config(folder, **changes), target, cause)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"target_layer_ids": [1, 6]}, rf"target_layer_ids \[1, 6\], the target has layers 0 .. 5: {OTHER}"),
        ({"target_layer_ids": [-1, 3]}, r"target_layer_ids \[-1, 3\], the target has layers"),
        ({"target_layer_ids": [1, 5]}, "target_layer_ids name the last layer 5, .* after the final norm"),
        ({"target_layer_ids": [0, 0]}, r"target_layer_ids \[0, 0\] name a layer twice"),
        ({"target_layer_ids": []}, r"target_layer_ids \[\] must be layer numbers"),
        ({"target_layer_ids": [1, "3"]}, "target_layer_ids .* must be layer numbers"),
        ({"target_layer_ids": [1, True]}, "target_layer_ids .* must be layer numbers"),
        ({"target_layer_ids": 3}, "dflash_config.target_layer_ids is 3, not list"),
        ({"target_layer_ids": [1, 2, 3]}, r"fc.weight is \[32, 64\], config.json says \[32, 96\]"),
        ({"mask_token_id": None}, "mask_token_id None is no token of the target"),
        ({"mask_token_id": 61}, "mask_token_id 61 is no token of the target"),
        ({"mask_token_id": -1}, "mask_token_id -1 is no token of the target"),
        ({"mask_token_id": "<mask>"}, "mask_token_id <mask> is no token of the target"),
        ({"mask_token_id": True}, "mask_token_id True is no token of the target"),
        ({"block_size": "8"}, "dflash_config.block_size is '8', not int"),
        ({"num_target_layers": 0}, "num_target_layers is 6 and 0 at once"),
        ({"num_target_layers": "6"}, "dflash_config.num_target_layers is '6', not int"),
        ({"causal_blocks": 2, "shift": 1}, "dflash_config.causal_blocks, dflash_config.shift would be ignored"),
    ],
    ids=lambda value: "" if isinstance(value, str) else json.dumps(value),
)
def test_values_of_dflash_config(folder: Path, target: Target, changes: dict[str, Any], cause: str) -> None:
    dflash = read_config(folder)["dflash_config"]
    assert_refused(edit_config(folder, dflash_config={**dflash, **changes}), target, cause)


def test_no_mask_token(folder: Path, target: Target) -> None:
    assert_refused(
        edit_config(folder, dflash_config={"target_layer_ids": [1, 3]}), target, "mask_token_id -1 is no token"
    )


def test_a_key_given_twice_must_agree(folder: Path, target: Target) -> None:
    """Block size or taps in both places, of which one would be dropped."""
    dflash = read_config(folder)["dflash_config"]
    edit_config(folder, dflash_config={**dflash, "block_size": 16})
    assert_refused(folder, target, "block_size is 8 and 16 at once")
    edit_config(folder, dflash_config=dflash, target_layer_ids=[1, 2])
    assert_refused(folder, target, r"target_layer_ids is \[1, 2\] and \[1, 3\] at once")


@pytest.mark.parametrize("block_size", [2, 5, 16, 64])
def test_a_block_size_of_ones_own(folder: Path, target: Target, block_size: int) -> None:
    assert load_drafter(folder, target, block_size=block_size).config.block_size == block_size


@pytest.mark.parametrize("block_size", [0, 1, 65])
def test_a_block_size_out_of_range(folder: Path, target: Target, block_size: int) -> None:
    assert_refused(folder, target, f"block_size {block_size} is out of range", block_size=block_size)


def test_a_block_size_in_either_place_is_read(folder: Path, target: Target) -> None:
    dflash = read_config(folder)["dflash_config"]
    edit_config(folder, remove=("block_size",), dflash_config={**dflash, "block_size": 5})
    assert load_drafter(folder, target).config.block_size == 5


@pytest.mark.parametrize(
    ("n_target", "n_draft", "wanted"),
    [(36, 5, (1, 9, 17, 25, 33)), (30, 5, (1, 8, 14, 20, 27)), (6, 2, (1, 3)), (32, 1, (16,)), (28, 3, (1, 13, 25))],
)
def test_default_taps(n_target: int, n_draft: int, wanted: tuple[int, ...]) -> None:
    """Evenly from layer 1 to the fourth from last, with Python's rounding; z-lab's Qwen3-8B drafter is the first."""
    assert default_tap_layers(n_target, n_draft) == wanted


def test_a_drafter_without_tap_numbers_gets_the_default(folder: Path, target: Target) -> None:
    edit_config(folder, dflash_config={"mask_token_id": 3})
    assert load_drafter(folder, target).config.tap_layers == (1, 3)


def test_a_default_beyond_a_short_target_is_refused(tmp_path: Path) -> None:
    short = make_target(tmp_path / "t", "llama", num_hidden_layers=2)
    drafter = make_drafter(tmp_path / "d", short, dflash_config={"mask_token_id": 3})
    with pytest.raises(UserError, match=r"target_layer_ids \[1, -1\]"):
        read_drafter_config(drafter, read_target_config(short))


def test_harmless_keys_are_reported(folder: Path, target: Target) -> None:
    edit_config(folder, initializer_range=0.02, use_cache=True, auto_map={"AutoModel": "x.Y"}, bos_token_id=1)
    ignored = load_drafter(folder, target).config.ignored_keys
    assert {"initializer_range", "use_cache", "auto_map", "bos_token_id"} <= set(ignored)
    assert not {"block_size", "dflash_config", "layer_types", "sliding_window", "num_target_layers"} & set(ignored)


def test_missing_extra_and_misshapen_tensors(folder: Path, target: Target) -> None:
    whole = load_weights(folder)
    for name in ("fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"):
        save_weights(folder, {k: v for k, v in whole.items() if k != name})
        assert_refused(folder, target, f"no tensor {name}")
        save_weights(folder, {**whole, name: whole[name][:-1]})
        assert_refused(folder, target, rf"{name} is \[.*\], config.json says \[")
    for name in ("embed_tokens.weight", "lm_head.weight", "layers.2.mlp.up_proj.weight", "fc.bias"):
        save_weights(folder, {**whole, name: torch.ones(3)})
        assert_refused(folder, target, rf"1 tensors that config.json does not ask for \({name}\)")


def test_biases_must_be_asked_for(target_path: Path, target: Target, folder: Path, tmp_path: Path) -> None:
    assert_refused(edit_config(folder, attention_bias=True), target, "no tensor layers.0.self_attn.q_proj.bias")
    biased = make_drafter(tmp_path / "biased", target_path, taps=[1, 3], attention_bias=True)
    assert_refused(edit_config(biased, attention_bias=False), target, "8 tensors that config.json does not ask for")


def test_a_truncated_file(folder: Path, target: Target) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert_refused(folder, target, "model.safetensors is damaged")


def test_a_drafter_of_the_targets_twin_in_other_sizes(tmp_path: Path, folder: Path) -> None:
    """The same family in other sizes: hidden size, depth and vocabulary are each enough to tell."""
    for settings in ({"hidden_size": 48}, {"num_hidden_layers": 7}, {"vocab_size": 60}):
        other = make_target(tmp_path / str(settings), "llama", **{"num_hidden_layers": N_LAYERS, **settings})
        assert_refused(folder, load_target(other, torch.float32, torch.device("cpu")), OTHER)
        shutil.rmtree(other)
