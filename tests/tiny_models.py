"""Tiny random models as Hugging Face folders: targets of each family, written by transformers, and DFlash drafters."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

FAMILIES = ("llama", "qwen2", "qwen3")
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>")
MASK_TOKEN = 3
ALPHABET = string.ascii_lowercase + "Ġ" + string.ascii_uppercase + string.digits + string.punctuation
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


def make_target(folder: Path, family: str, *, seed: int = 0, max_shard_size: str = "1GB", **settings: Any) -> Path:
    """Write a random target with its tokenizer.

    Args:
        settings: of transformers' config class, over the defaults below.
    """
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
            "tie_word_embeddings": False,
            **settings,
        },
    )
    model = AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(random_weight(name, tuple(weight.shape), generator))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    make_tokenizer(folder, config.vocab_size)
    return folder


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Scaled so that attention is uneven, every layer matters, and logits spread over a few units."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return 0.3 * noise
    if "norm" in name:
        return 1 + 0.2 * noise
    if "embed_tokens" in name:
        return 0.5 * noise
    gain = 2.0 if name.startswith("lm_head") or "q_proj" in name or "k_proj" in name else 1.0
    return gain * noise / shape[-1] ** 0.5


def make_tokenizer(folder: Path, vocab_size: int) -> None:
    """One character a token: special tokens first, then `a`, `b`, ..., a blank, `A`, ...

    Byte-level, because transformers puts its own byte-level class in place of any other for the qwen2 family.
    """
    tokens = [*SPECIAL_TOKENS, *ALPHABET][:vocab_size]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=["<mask>"],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


def make_drafter(
    folder: Path,
    target: Path,
    *,
    seed: int = 1,
    block_size: int = 8,
    taps: list[int] | None = None,
    n_layers: int = 2,
    **settings: Any,
) -> Path:
    """Write a random DFlash drafter for ``target`` in the z-lab format.

    Args:
        taps: `target_layer_ids`; by default the first two layers.
        settings: keys of `config.json`, over the defaults below.
    """
    of_target = read_config(target)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 1] if taps is None else taps},
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": of_target["hidden_size"],
        "intermediate_size": 48,
        "layer_types": ["full_attention"] * n_layers,
        "max_position_embeddings": of_target["max_position_embeddings"],
        "max_window_layers": n_layers,
        "num_attention_heads": 4,
        "num_hidden_layers": n_layers,
        "num_key_value_heads": 2,
        "num_target_layers": of_target["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": of_target["vocab_size"],
        **settings,
    }
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shapes = drafter_shapes(config, n_taps=len(config["dflash_config"].get("target_layer_ids") or range(n_layers)))
    save_weights(folder, {name: random_weight(name, shape, generator) for name, shape in shapes.items()})
    return folder


def drafter_shapes(config: dict[str, Any], n_taps: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a drafter's tensors."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, n_taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            shapes[f"layers.{i}.{name}.weight"] = shape
            if config["attention_bias"] and name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
                shapes[f"layers.{i}.{name}.bias"] = shape[:1]
    return shapes


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def edit_config(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> Path:
    """Change `config.json` in place."""
    config = {key: value for key, value in read_config(folder).items() if key not in remove}
    (folder / "config.json").write_text(json.dumps({**config, **changes}, indent=2))
    return folder


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def save_weights(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reference_model(folder: Path) -> PreTrainedModel:
    """The folder in transformers, float32, ready to compare with."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.generation_config.eos_token_id = None
    return model.eval()
