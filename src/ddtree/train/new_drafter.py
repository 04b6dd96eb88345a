"""A new drafter for a target: its `config.json` in the z-lab format, and weights to start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ddtree.errors import UserError
from ddtree.models.config_file import read_json_object
from ddtree.models.drafter_config import default_tap_layers
from ddtree.models.target_config import TargetConfig
from ddtree.models.tokenizer import Tokenizer
from ddtree.train.settings import NewDrafter

INITIAL_SCALE = 0.02


def drafter_config(shape: NewDrafter, target: TargetConfig, target_folder: Path, mask_token_id: int) -> dict[str, Any]:
    """The `config.json` of a new drafter (the keys that z-lab's drafters carry).

    Raises:
        UserError: sizes that do not fit each other or the target.
    """
    layer = target.layer
    heads, kv_heads = shape.heads or layer.n_heads, shape.kv_heads or layer.n_kv_heads
    if heads % kv_heads:
        raise UserError(f"{heads} heads cannot share {kv_heads} key heads", "give a multiple of the key heads")
    taps = shape.tap_layers
    if taps is None:
        taps = default_tap_layers(target.n_layers, shape.layers)
        if len(set(taps)) < len(taps) or min(taps) < 0:
            raise UserError(
                f"a target of {target.n_layers} layers has no {shape.layers} to spread the drafter's taps over",
                "give fewer drafter layers, or name the taps",
            )
    of_target = read_json_object(target_folder / "config.json")
    rope = {"rope_type": target.rope.rope_type, "rope_theta": target.rope.theta, **target.rope.parameters}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": shape.block_size,
        "bos_token_id": of_target.get("bos_token_id"),
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(taps)},
        "dtype": "bfloat16",
        "eos_token_id": of_target.get("eos_token_id"),
        "head_dim": shape.head_dim or layer.head_dim,
        "hidden_act": "silu",
        "hidden_size": layer.hidden_size,
        "initializer_range": INITIAL_SCALE,
        "intermediate_size": shape.intermediate_size or layer.intermediate_size,
        **({"is_causal": True} if shape.is_causal else {}),
        "layer_types": ["sliding_attention" if shape.sliding_window else "full_attention"] * shape.layers,
        "max_position_embeddings": target.max_positions,
        "max_window_layers": shape.layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": kv_heads,
        "num_target_layers": target.n_layers,
        "pad_token_id": of_target.get("pad_token_id"),
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "rope_scaling": None if target.rope.rope_type == "default" else scaling,
        "rope_theta": target.rope.theta,
        "sliding_window": shape.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": shape.sliding_window is not None,
        "vocab_size": target.vocab_size,
    }


def choose_mask_token(tokenizer: Tokenizer, target: TargetConfig) -> int:
    """A token that chat text does not contain.

    One that the tokenizer calls a mask; else an id of the embedding beyond the tokenizer's last; else the last special
    token that neither ends or begins a text nor stands in the chat template.

    Raises:
        UserError: the tokenizer has none.
    """
    special = tokenizer.special_tokens
    for token_id, text in sorted(special.items()):
        if "mask" in text.lower():
            return token_id
    if tokenizer.n_tokens < target.vocab_size:
        return tokenizer.n_tokens
    in_use = {target.bos_token_id, *target.eos_token_ids, *tokenizer.edge_token_ids}
    free = [i for i, text in special.items() if i not in in_use and text not in tokenizer.chat_template]
    if not free:
        raise UserError("this tokenizer has no special token to spare for the mask", "name one with --mask-token")
    return max(free)


def initial_weights(
    shapes: Iterator[tuple[str, torch.Size]], final_norm: torch.Tensor, seed: int
) -> dict[str, torch.Tensor]:
    """Weights to start from, float32 on the CPU: matrices normal(0, 0.02), norms one, the final norm the target's."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes:
        if name == "norm.weight":
            weights[name] = final_norm.detach().float().cpu().clone()
        elif name.endswith(".bias"):
            weights[name] = torch.zeros(shape)
        elif len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * INITIAL_SCALE
    return weights
