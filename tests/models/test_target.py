"""The target's logits against transformers, in float32: chunked prefill, one token a step, and as a tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

from ddtree.demo.target import target_folder
from target_runner import TargetRunner
from tiny_models import FAMILIES, edit_config, make_target, read_config, reference_model

TOLERANCE = 1e-4
TOKENS = torch.randint(0, 61, (48,), generator=torch.Generator().manual_seed(2)).tolist()
PROMPT, TREE_TOKENS = TOKENS[:30], TOKENS[30:42]
TREE_PARENTS = [-1, 0, 0, -1, 1, 1, 3, 4, 7, 2, 6, 8]


def path_to(node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, TREE_TOKENS[node])
        node = TREE_PARENTS[node]
    return path


@torch.no_grad()
def full_forward(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


@torch.no_grad()
def stepwise(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits of decoding with a cache, one token a step."""
    cache = DynamicCache(config=model.config)
    return torch.cat([model(torch.tensor([[t]]), None, None, cache, use_cache=True).logits[0] for t in tokens])


def check_folder(folder: Path) -> None:
    """Every way of running the target against transformers on the same folder."""
    model = reference_model(folder)
    wanted = full_forward(model, PROMPT)

    def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert theirs.std() > 0.3, "the test model says nothing"
        assert (ours - theirs).abs().max() <= TOLERANCE

    whole = TargetRunner(folder, len(PROMPT))
    close(whole.chain(PROMPT), wanted)
    pieces = TargetRunner(folder, len(PROMPT))
    close(torch.cat([pieces.chain(PROMPT[a:b]) for a, b in ((0, 11), (11, 12), (12, 30))]), wanted)
    steps = TargetRunner(folder, 1)
    close(torch.cat([steps.chain([t]) for t in PROMPT]), stepwise(model, PROMPT))
    for runner in (whole, pieces):
        rows = runner.tree(TREE_TOKENS, TREE_PARENTS)
        paths = [full_forward(model, PROMPT + path_to(node))[-1] for node in range(len(TREE_TOKENS))]
        close(rows, torch.stack(paths))


BIASES: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, {"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}],
    "qwen2": [{}],  # always with biases on q, k and v
    "qwen3": [{}, {"attention_bias": True}],
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with all its keys": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
        "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.4, "truncate": False,
    },
    "yarn with its scale given": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3,
    },
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
    },
    "longrope with its scale given": {
        "rope_type": "longrope", "attention_factor": 1.2, "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "proportional": {"rope_type": "proportional", "factor": 2.0},
    "proportional in part": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("family", "biases"),
    [pytest.param(f, b, id="-".join([f, *b])) for f in FAMILIES for b in BIASES[f]],
)
def test_families(tmp_path: Path, family: str, biases: dict[str, Any], tied: bool) -> None:
    check_folder(make_target(tmp_path, family, tie_word_embeddings=tied, **biases))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(
    ("family", "form"), [*((family, "rope_parameters") for family in FAMILIES), ("llama", "rope_scaling")]
)
def test_rope_types(tmp_path: Path, family: str, rope: str, form: str) -> None:
    """The new form of the config, and the older one with `rope_scaling` beside `rope_theta`."""
    parameters = {"rope_theta": 500.0, **ROPES[rope]}
    make_target(tmp_path, family, rope_parameters=parameters)
    if form == "rope_scaling":
        scaling = {k: v for k, v in parameters.items() if k != "rope_theta"}
        edit_config(tmp_path, remove=("rope_parameters",), rope_scaling=scaling, rope_theta=500.0)
    model = reference_model(tmp_path)
    assert model.config.rope_parameters["rope_theta"] == 500.0
    assert model.config.rope_parameters["rope_type"] == parameters["rope_type"]
    check_folder(tmp_path)


def test_the_oldest_rope_keys(tmp_path: Path) -> None:
    """`type` instead of `rope_type`, and the original length beside the parameters instead of in them."""
    make_target(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    edit_config(
        tmp_path,
        remove=("rope_parameters",),
        rope_scaling={"type": "yarn", "factor": 4.0},
        rope_theta=500.0,
        original_max_position_embeddings=64,
    )
    check_folder(tmp_path)


@pytest.mark.parametrize(
    ("settings", "old"),
    [
        ({"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, False),
        ({"sliding_window": 7, "layer_types": ["sliding_attention"] * 3}, False),
        ({"sliding_window": 2, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, False),
        ({"sliding_window": 9, "max_window_layers": 1}, True),
        ({"sliding_window": 9, "max_window_layers": 0}, True),
        ({"sliding_window": 9, "max_window_layers": 3}, True),
    ],
    ids=lambda value: "" if isinstance(value, bool) else "-".join(map(str, value.values())),
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_sliding_window_layers(tmp_path: Path, family: str, settings: dict[str, Any], old: bool) -> None:
    """Given by `layer_types`, or in older configs by the first sliding layer."""
    make_target(tmp_path, family, use_sliding_window=True, **settings)
    if old:
        edit_config(tmp_path, remove=("layer_types",))
    check_folder(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": None},
        {"use_sliding_window": None, "sliding_window": 9, "max_window_layers": 1},
        {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 1},
    ],
    ids=lambda settings: "-".join(f"{k}={v}" for k, v in settings.items()),
)
def test_a_half_named_sliding_window_means_what_it_means_to_transformers(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    make_target(tmp_path, "qwen3", num_hidden_layers=30)
    absent = tuple(key for key, value in settings.items() if value is None)
    edit_config(tmp_path, remove=("layer_types", "sliding_window", "max_window_layers", "use_sliding_window"))
    edit_config(tmp_path, **{k: v for k, v in settings.items() if k not in absent}, layer_types=None)
    windows = TargetRunner(tmp_path, 1).target.config.sliding_windows
    theirs = reference_model(tmp_path).config
    wanted = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert list(windows) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_head_size_apart_from_hidden_size(tmp_path: Path, family: str) -> None:
    check_folder(
        make_target(tmp_path, family, hidden_size=48, num_attention_heads=6, num_key_value_heads=3, head_dim=16)
    )


def test_head_size_from_hidden_size(tmp_path: Path) -> None:
    """Older Llama and Qwen2 configs name no head_dim."""
    for family in ("llama", "qwen2"):
        check_folder(edit_config(make_target(tmp_path / family, family), remove=("head_dim",)))


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_one_or_all_key_value_heads(tmp_path: Path, kv_heads: int) -> None:
    check_folder(make_target(tmp_path, "llama", num_key_value_heads=kv_heads))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sharded_weights(tmp_path: Path, tied: bool) -> None:
    make_target(tmp_path, "qwen3", max_shard_size="20KB", tie_word_embeddings=tied)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check_folder(tmp_path)


def test_taps_are_outputs_of_decoder_layers(tmp_path: Path) -> None:
    """Tap i is transformers' hidden_states[i + 1]; what the head reads has passed the final norm."""
    make_target(tmp_path, "llama", num_hidden_layers=4)
    with torch.no_grad():
        theirs = reference_model(tmp_path)(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    runner = TargetRunner(tmp_path, len(PROMPT))
    ours = torch.cat([runner.taps(PROMPT[:13], (2, 0)), runner.taps(PROMPT[13:], (2, 0))])
    assert (ours - torch.cat((theirs[3], theirs[1]), dim=-1)[0]).abs().max() <= TOLERANCE


def test_config_is_read_back(tmp_path: Path) -> None:
    make_target(tmp_path, "llama", eos_token_id=[2, 5])
    config = TargetRunner(tmp_path, 1).target.config
    assert config.eos_token_ids == (2, 5) and config.bos_token_id == 1
    assert config.vocab_size == read_config(tmp_path)["vocab_size"]


def test_smollm2() -> None:
    """The real target in float32, against transformers in float64.

    On some processors two sums in float32 are further apart than each is from the truth.
    """
    folder = target_folder()
    model = reference_model(folder).double()
    text = "The Danube rises in the Black Forest and flows through ten countries. def add(a, b):\n    return a + b"
    tokens = AutoTokenizer.from_pretrained(folder)(text).input_ids
    wanted = full_forward(model, tokens)
    runner = TargetRunner(folder, len(tokens))
    ours = torch.cat([runner.chain(tokens[:9]), runner.chain(tokens[9:10]), runner.chain(tokens[10:])])
    tolerance = 5e-6 * wanted.abs().max()  # a last digit or two of the largest logit
    assert (ours - wanted).abs().max() <= tolerance
    parents = [-1, 0, 1, 1, -1, 4]
    nodes = tokens[5:11]
    rows = runner.tree(nodes, parents)
    for node, path in {2: [0, 1, 2], 3: [0, 1, 3], 5: [4, 5]}.items():
        theirs = full_forward(model, tokens + [nodes[i] for i in path])[-1]
        assert (rows[node] - theirs).abs().max() <= tolerance
