"""A tiny random target of DeepSeek-V3's and Kimi K2's shape (MLA, experts), and a drafter for it, both made here.

    python benchmarks/sglang_h200/tiny_moe.py TOKENIZER_FOLDER OUT

A random model says nothing, but its text must be the same with trees as without. Weights are scaled so that it tells:

- only `LIVE` tokens are ever likely, so that a random drafter's trees hold the right token often, on crooked paths;
- the head is blind to the live tokens' own embeddings, so that what comes next hangs on what attention sees;
- the last of the experts that a token picks weighs little: a router's near-tie is no other text.

One dimension of the residual stream (0) is a constant that no layer writes: it lifts the live tokens above all others,
and it shifts the routers' scores. By transformers, over 120 tokens: swapping two of the last three tokens changes the
next one in a quarter of cases, and bfloat16 moves logits by 0.1 (at most 1.1), where the best leads by 3 to 6.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LIVE = (300, 4000, 17000, 42000)
HIDDEN, VOCABULARY, LAYERS, HEADS = 512, 49152, 3, 8
NOPE, VALUE, LATENT, QUERY_LATENT = 64, 128, 512, 192
EXPERTS, PICKED, EXPERT_WIDTH, MLP_WIDTH = 48, 6, 128, 1024
DRAFT_LAYERS, DRAFT_KV_HEADS, DRAFT_HEAD, BLOCK, TAPS = 2, 4, 64, 16, (0, 1)
ROPE = {512: 64, 256: 32}
"""Rotary size by size of MLA's latent: the two pairs that SGLang's Triton kernel for decoding knows."""

CONSTANT = 16.0
"""What the residual stream holds in dimension 0."""

FOR_ROUTERS = 0.05
"""As much of it as routers and experts see; attention sees nothing of it."""

EMBEDDING, ATTENTION = 0.5, 3.0
"""Standard deviations of embeddings and of what attention adds to them, were it to look at one place alone."""

LIFT, SPREAD = 80.0, 8.0
"""What lifts the logits of live tokens, and their standard deviation; the best ends up between 16 and 32."""

SHARP = 1.3
"""Standard deviation of queries and keys; their products decide where attention looks."""

ROUTER_SPREAD, ROUTER_SHIFT = 4.0, -25.0
"""Router scores before the sigmoid: far below 0, so that weights fall with them as an exponential does."""

Weights = dict[str, torch.Tensor]


class Maker:
    """Random matrices whose products have a given standard deviation for inputs of about 1."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)

    def matrix(self, outputs: int, inputs: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=self._random) * (scale / inputs**0.5)

    def into_stream(self, inputs: int, scale: float = 1.0) -> torch.Tensor:
        """A matrix into the residual stream, whose constant it leaves alone."""
        made = self.matrix(HIDDEN, inputs, scale)
        made[0] = 0
        return made


def target_weights(make: Maker, latent: int) -> Weights:
    """All tensors of the target, named as in DeepSeek's checkpoints."""
    rope = ROPE[latent]
    embedding = make.matrix(VOCABULARY, HIDDEN, EMBEDDING * HIDDEN**0.5)
    embedding[:, 0] = CONSTANT
    head = torch.zeros(VOCABULARY, HIDDEN)
    # Blind to the live tokens' own embeddings: what comes next is up to attention and experts.
    known = torch.linalg.qr(embedding[list(LIVE)].T).Q
    chosen = make.matrix(len(LIVE), HIDDEN, SPREAD)
    head[list(LIVE)] = chosen - chosen @ known @ known.T
    head[:, 0] = -LIFT / CONSTANT
    head[list(LIVE), 0] = LIFT / CONSTANT
    found: Weights = {
        "model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN),
    }  # fmt: skip
    for index in range(LAYERS):
        at = f"model.layers.{index}."
        key_value = make.matrix(HEADS * (NOPE + VALUE), latent).view(HEADS, NOPE + VALUE, latent)
        key_value[:, :NOPE] *= SHARP
        latent_and_rope = make.matrix(latent + rope, HIDDEN)
        latent_and_rope[latent:] *= SHARP
        found |= {
            f"{at}input_layernorm.weight": norm(0),
            f"{at}post_attention_layernorm.weight": norm(FOR_ROUTERS),
            f"{at}self_attn.q_a_proj.weight": make.matrix(QUERY_LATENT, HIDDEN),
            f"{at}self_attn.q_a_layernorm.weight": torch.ones(QUERY_LATENT),
            f"{at}self_attn.q_b_proj.weight": make.matrix(HEADS * (NOPE + rope), QUERY_LATENT, SHARP),
            f"{at}self_attn.kv_a_proj_with_mqa.weight": latent_and_rope,
            f"{at}self_attn.kv_a_layernorm.weight": torch.ones(latent),
            f"{at}self_attn.kv_b_proj.weight": key_value.reshape(-1, latent),
            f"{at}self_attn.o_proj.weight": make.into_stream(HEADS * VALUE, ATTENTION),
        }
        if index == 0:
            found |= mlp(make, f"{at}mlp.", MLP_WIDTH, 1.5)
            continue
        router = make.matrix(EXPERTS, HIDDEN, ROUTER_SPREAD)
        router[:, 0] = ROUTER_SHIFT / (FOR_ROUTERS * CONSTANT)
        found |= {
            f"{at}mlp.gate.weight": router,
            f"{at}mlp.gate.e_score_correction_bias": torch.zeros(EXPERTS),
        } | mlp(make, f"{at}mlp.shared_experts.", EXPERT_WIDTH, 1.0)
        for expert in range(EXPERTS):
            found |= mlp(make, f"{at}mlp.experts.{expert}.", EXPERT_WIDTH, 1.0)
    return found


def norm(of_constant: float) -> torch.Tensor:
    """Weights of a norm that passes on ``of_constant`` of the stream's constant and all of the rest."""
    weights = torch.ones(HIDDEN)
    weights[0] = of_constant
    return weights


def mlp(make: Maker, at: str, width: int, scale: float) -> Weights:
    return {
        f"{at}gate_proj.weight": make.matrix(width, HIDDEN, 1.5),
        f"{at}up_proj.weight": make.matrix(width, HIDDEN, 1.5),
        f"{at}down_proj.weight": make.into_stream(width, scale),
    }


def drafter_weights(make: Maker) -> Weights:
    """All tensors of the drafter in the z-lab format. Its last norm keeps the constant and little of the rest."""
    last_norm = 0.05 * torch.ones(HIDDEN)
    last_norm[0] = 1
    found: Weights = {
        "fc.weight": make.matrix(HIDDEN, len(TAPS) * HIDDEN), "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": last_norm,
    }  # fmt: skip
    for index in range(DRAFT_LAYERS):
        at = f"layers.{index}."
        found |= {
            f"{at}input_layernorm.weight": norm(0),
            f"{at}post_attention_layernorm.weight": norm(0),
            f"{at}self_attn.q_proj.weight": make.matrix(HEADS * DRAFT_HEAD, HIDDEN),
            f"{at}self_attn.k_proj.weight": make.matrix(DRAFT_KV_HEADS * DRAFT_HEAD, HIDDEN),
            f"{at}self_attn.v_proj.weight": make.matrix(DRAFT_KV_HEADS * DRAFT_HEAD, HIDDEN),
            f"{at}self_attn.o_proj.weight": make.into_stream(HEADS * DRAFT_HEAD),
            f"{at}self_attn.q_norm.weight": torch.ones(DRAFT_HEAD),
            f"{at}self_attn.k_norm.weight": torch.ones(DRAFT_HEAD),
        } | mlp(make, f"{at}mlp.", MLP_WIDTH, 1.0)
    return found


def target_config(latent: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "hidden_act": "silu",
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE,
        "qk_rope_head_dim": ROPE[latent], "kv_lora_rank": latent, "q_lora_rank": QUERY_LATENT, "attention_bias": False,
        "intermediate_size": MLP_WIDTH, "moe_intermediate_size": EXPERT_WIDTH, "n_routed_experts": EXPERTS,
        "n_shared_experts": 1, "num_experts_per_tok": PICKED, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 2, "use_cache": True,
    }  # fmt: skip


def drafter_config() -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": DRAFT_LAYERS, "head_dim": DRAFT_HEAD,
        "num_attention_heads": HEADS, "num_key_value_heads": DRAFT_KV_HEADS, "intermediate_size": MLP_WIDTH,
        "layer_types": ["full_attention"] * DRAFT_LAYERS, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 4096, "attention_bias": False, "tie_word_embeddings": False, "block_size": BLOCK,
        "num_target_layers": LAYERS, "dflash_config": {"mask_token_id": 16, "target_layer_ids": list(TAPS)},
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "use_sliding_window": False, "sliding_window": None,
    }  # fmt: skip


def make_pair(tokenizer: Path, out: Path, latent: int = LATENT) -> tuple[Path, Path]:
    """Write both folders below ``out``, unless they are there; the target's and the drafter's.

    Args:
        tokenizer: folder with ``tokenizer.json`` and ``tokenizer_config.json`` of a vocabulary of `VOCABULARY`.
        latent: size of MLA's latent, of `ROPE`; the kit's FlashAttention knows 512 only, Triton in float32 needs less.
    """
    target, drafter = out / f"target-{latent}", out / "drafter"
    for folder, config, weights in (
        (target, target_config(latent), lambda: target_weights(Maker(1), latent)),
        (drafter, drafter_config(), lambda: drafter_weights(Maker(2))),
    ):
        if folder.is_dir():
            continue
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        tensors = {k: (w if "correction" in k else w.bfloat16()).contiguous() for k, w in weights().items()}
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(config, indent=1))
        if folder is target:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(tokenizer / name, part / name)
        part.rename(folder)
    return target, drafter


if __name__ == "__main__":
    print(*make_pair(Path(sys.argv[1]), Path(sys.argv[2])))
