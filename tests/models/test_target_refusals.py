"""What is wrong with a target folder is refused at load, by name and with a remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree.errors import UserError
from ddtree.models.target import load_target
from ddtree.models.target_config import read_target_config
from ddtree.models.tokenizer import Tokenizer
from tiny_models import edit_config, load_weights, make_target, save_weights

NAN, INF = float("nan"), float("inf")  # Python's JSON knows them


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {family: make_target(root / family, family) for family in ("llama", "qwen2", "qwen3")}


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama target that a test may damage; its path does not hold the test's name, which messages repeat."""
    return shutil.copytree(folders["llama"], tmp_path_factory.mktemp("x") / "target")


def load(folder: Path) -> None:
    load_target(folder, torch.float32, torch.device("cpu"))


def assert_refused(folder: Path, cause: str) -> None:
    with pytest.raises(UserError, match=cause) as caught:
        load(folder)
    assert caught.value.remedy, "no remedy"


def test_no_folder(tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent", "there is no model folder .*absent")


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file", "there is no model folder .*file")


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    assert_refused(tmp_path / ("x" * 300), "the model folder .* cannot be read .File name too long")


def test_deeply_nested_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert_refused(folder, r"config.json cannot be read as JSON \(nested too deeply\)")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert_refused(folder, "is not a model: it has no config.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"", b'{"model_type": "lla', b"\xff\xfe\x00", b"[1, 2]", b"null"])
def test_broken_json(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    assert_refused(folder, rf"{name}.* (cannot be read as JSON|holds no JSON object)")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3'.*is not supported"),
        ({"model_type": None}, "model_type ''.*is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*is not supported"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "'llama' with architectures .*Qwen3ForCausalLM"),
        ({"final_logit_softcapping": 30.0, "zebra": 1}, "final_logit_softcapping, zebra would be ignored"),
        ({"sliding_window": 9}, "sliding_window would be ignored"),  # the llama family has no such layers
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, not int"),
        ({"hidden_size": "32"}, "hidden_size is '32', not int"),
        ({"head_dim": -8}, "head_dim is -8"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', not bool"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        *(({"rms_norm_eps": value}, "rms_norm_eps is .*") for value in (0, -1e-6, 1.0, NAN, INF, 10**400)),
        *(({"rope_theta": value}, "rope_theta is .*") for value in (0, 0.0, -1.0, 0.99, 1e-30, NAN, INF, 10**400)),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"pretraining_tp": 2}, "pretraining_tp 2 is not supported"),
        ({"rope_interleaved": True}, "rope_interleaved true is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id is"),
    ],
    ids=lambda value: "" if isinstance(value, str) else json.dumps(value),
)
def test_config_values(folder: Path, changes: dict[str, Any], cause: str) -> None:
    assert_refused(edit_config(folder, **changes), cause)


@pytest.mark.parametrize(
    ("family", "changes", "cause"),
    [
        ("qwen2", {"attention_bias": False}, "attention_bias false contradicts"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias would be ignored"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias would be ignored"),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, "layer_types must give .* each of 3 layers"),
        ("qwen3", {"layer_types": ["full_attention"] * 2 + ["linear_attention"]}, "layer_types must give"),
        ("qwen3", {"layer_types": ["full_attention"] * 2 + [["x"]]}, "layer_types must give"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "layer_types asks for sliding_attention, but"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True}, "layer_types asks for"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True, "sliding_window": 0},
            "asks for",
        ),
    ],
)
def test_config_values_of_a_family(
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    changes: dict[str, Any],
    cause: str,
) -> None:
    folder = shutil.copytree(folders[family], tmp_path_factory.mktemp("x") / "target")
    assert_refused(edit_config(folder, **changes), cause)


ROPE_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("parameters", "cause"),
    [
        ({"rope_type": "mrope"}, "rope_type 'mrope' is not known"),
        ({"rope_type": ["linear"]}, "is not known"),
        ({"rope_type": "linear"}, "rope_type 'linear' needs factor"),
        ({"rope_type": "linear", "factor": "2"}, "rope_parameters.factor is '2'"),
        ({"rope_type": "linear", "factor": 0}, "rope_parameters.factor is 0"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "beta_fast do not belong to rope_type 'linear'"),
        ({"rope_type": "dynamic", "factor": 2.0, "zebra": 3}, "zebra do not belong to rope_type 'dynamic'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type 'longrope' needs short_factor"),
        (
            {"rope_type": "longrope", "factor": 2.0, **ROPE_FACTORS, "long_factor": [1.0] * 3},
            r"rope_parameters.long_factor is \[",
        ),
        ({"rope_type": "llama3", "factor": 2.0, "high_freq_factor": 4.0}, "needs low_freq_factor"),
        ({"rope_type": "default", "rope_theta": "big"}, "rope_parameters.rope_theta is 'big'"),
        *(
            ({"rope_type": "default", "rope_theta": value}, "rope_parameters.rope_theta is ")
            for value in (0, 0.0, -1.0, 0.99, 1e-30, NAN, INF, 10**400)
        ),
        *(({"rope_type": "linear", "factor": value}, "rope_parameters.factor is ") for value in (NAN, INF, 10**400)),
        (
            {"rope_type": "longrope", "factor": 2.0, **ROPE_FACTORS, "short_factor": [1.0, 1.0, 1.0, INF]},
            r"rope_parameters.short_factor is \[",
        ),
        ({"full_attention": {"rope_type": "default"}}, "rope_parameters differ by layer"),
        ("default", "rope_parameters is 'default', not dict"),
    ],
    ids=lambda value: json.dumps(value),
)
def test_rope_parameters(folder: Path, parameters: Any, cause: str) -> None:
    assert_refused(edit_config(folder, rope_parameters=parameters), cause)


def test_two_rope_settings_that_disagree(folder: Path) -> None:
    edit_config(folder, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0})
    assert_refused(edit_config(folder, rope_theta=600.0), "rope_theta is 600.0 and 500.0 at once")
    edit_config(folder, rope_theta=500.0, rope_scaling={"rope_type": "linear", "factor": 3.0})
    assert_refused(folder, "rope_scaling and rope_parameters disagree")


@pytest.mark.parametrize(
    ("key", "value", "method"),
    [
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ("quantization_config", {"quant_method": "awq", "bits": 4}, "awq"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "gptq"),
        ("quantization_config", {"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ("compression_config", {"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ("quantization", {"group_size": 64, "bits": 4}, "unknown"),
    ],
)
def test_quantised_checkpoints(folder: Path, key: str, value: dict[str, Any], method: str) -> None:
    assert_refused(edit_config(folder, **{key: value}), rf"the weights are quantised \({method}\)")


def test_harmless_keys_are_reported(folder: Path) -> None:
    edit_config(folder, torch_dtype="float16", _name_or_path="x/y", temperature=0.6)
    ignored = read_target_config(folder).ignored_keys
    assert {"torch_dtype", "_name_or_path", "temperature", "initializer_range"} <= set(ignored)
    assert not {"model_type", "hidden_size", "rope_parameters", "eos_token_id"} & set(ignored)


def test_a_tensor_is_missing(folder: Path) -> None:
    weights = load_weights(folder)
    del weights["model.layers.1.mlp.up_proj.weight"]
    assert_refused(save_weights(folder, weights), "no tensor model.layers.1.mlp.up_proj.weight")


def test_the_head_is_missing(folder: Path) -> None:
    """A tied checkpoint whose config forgot to say so would answer nonsense."""
    weights = load_weights(folder)
    del weights["lm_head.weight"]
    assert_refused(save_weights(folder, weights), "no tensor lm_head.weight")


def test_a_tensor_too_many(folder: Path) -> None:
    """A fourth layer, and biases that the config does not ask for."""
    weights = load_weights(folder)
    extra = {"model.layers.3.mlp.up_proj.weight": torch.ones(2), "model.layers.0.self_attn.q_proj.bias": torch.ones(2)}
    save_weights(folder, weights | extra)
    assert_refused(folder, r"2 tensors that config.json does not ask for \(model.layers.0.self_attn.q_proj.bias")


def test_buffers_that_follow_from_the_config_do_no_harm(folder: Path) -> None:
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    load(save_weights(folder, load_weights(folder) | buffers))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.self_attn.k_proj.weight", "lm_head.weight"])
def test_a_tensor_of_another_shape(folder: Path, name: str) -> None:
    weights = load_weights(folder)
    weights[name] = weights[name][:-1]
    assert_refused(save_weights(folder, weights), rf"{name} is \[.*\], config.json says \[")


@pytest.mark.parametrize("rows", [60, 64], ids=["pruned", "padded"])
def test_an_embedding_of_another_vocabulary(folder: Path, rows: int) -> None:
    weights = load_weights(folder)
    weights["model.embed_tokens.weight"] = torch.ones(rows, 32)
    assert_refused(
        save_weights(folder, weights), rf"embed_tokens.weight is \[{rows}, 32\], config.json says \[61, 32\]"
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_packed_numbers(folder: Path, dtype: torch.dtype) -> None:
    weights = load_weights(folder)
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(dtype)
    assert_refused(save_weights(folder, weights), f"up_proj.weight holds {str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_that_differs(folder: Path, tied: bool) -> None:
    weights = load_weights(folder)
    edit_config(folder, tie_word_embeddings=True)
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        load(save_weights(folder, weights))
    else:
        assert_refused(folder, "tie_word_embeddings is true, but lm_head.weight differs")


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, -1])
def test_a_truncated_file(folder: Path, kept_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    assert_refused(folder, "model.safetensors is damaged")


def test_no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert_refused(folder, "has no model.safetensors")


@pytest.mark.parametrize("kind", ["missing shard", "too long", "outside", "not a name", "a list", "not a map", "empty"])
def test_shards(tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    folder = make_target(tmp_path_factory.mktemp("x"), "llama", max_shard_size="20KB")
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shard = sorted(set(index["weight_map"].values()))[1]
    if kind == "missing shard":
        (folder / shard).unlink()
    elif kind in ("not a map", "empty"):
        index["weight_map"] = [1] if kind == "not a map" else {}
    else:
        names = {"too long": "x" * 300, "outside": f"../{shard}", "not a name": 5, "a list": [1]}
        index["weight_map"]["model.norm.weight"] = names[kind]
    index_path.write_text(json.dumps(index))
    assert_refused(
        folder, {"missing shard": shard, "too long": "has no x", "outside": rf"\.\./{shard}"}.get(kind, "weight_map")
    )


@pytest.mark.parametrize("damage", ["absent", "broken"])
def test_no_tokenizer(folder: Path, damage: str) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink() if damage == "absent" else path.write_text("{")
    with pytest.raises(UserError, match="has no readable tokenizer"):
        Tokenizer(folder, 61)


def test_a_tokenizer_of_another_model(folder: Path) -> None:
    Tokenizer(folder, 61)
    with pytest.raises(UserError, match="the tokenizer has 61 tokens, the model 60"):
        Tokenizer(folder, 60)


@pytest.mark.parametrize("text", ["\udcff", "a\ud800"])
def test_text_with_half_a_character(folder: Path, text: str) -> None:
    tokenizer = Tokenizer(folder, 61)
    with pytest.raises(UserError, match="the prompt is not valid Unicode text"):
        tokenizer.encode(text)
    with pytest.raises(UserError, match="the prompt is not valid Unicode text"):
        tokenizer.encode_chat([{"role": "user", "content": text}])
