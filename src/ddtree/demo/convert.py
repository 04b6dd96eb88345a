"""Turn the GGUF of SmolLM2-135M-Instruct into a Hugging Face folder.

The result depends on the input bytes alone, so its weights have a known hash.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.demo.gguf import GgufFile
from ddtree.demo.progress import Progress, silent

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # the GGUF token type of special tokens


def convert(gguf_bytes: bytes, folder: Path, on_progress: Progress = silent) -> str:
    """Write the files of a Hugging Face model into the existing ``folder``; returns the SHA-256 of the weights."""
    source = GgufFile(gguf_bytes)
    metadata = source.metadata
    if metadata["general.architecture"] != "llama" or "output.weight" in source.tensors:
        raise ValueError("expected a llama model with tied embeddings")
    config = _model_config(metadata)
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **token_ids})
    _write_json(folder / "tokenizer.json", _tokenizer(metadata), indent=None)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))
    return _write_weights(folder / "model.safetensors", source, on_progress)


def _tensor_names(layers: int) -> Iterator[tuple[str, str]]:
    """GGUF name and Hugging Face name, in the order of the file to write."""
    yield "token_embd.weight", "model.embed_tokens.weight"
    for layer in range(layers):
        for theirs, ours in _LAYER_NAMES.items():
            yield f"blk.{layer}.{theirs}.weight", f"model.layers.{layer}.{ours}.weight"
    yield "output_norm.weight", "model.norm.weight"


def _write_weights(path: Path, source: GgufFile, on_progress: Progress) -> str:
    """Write bfloat16 safetensors, one tensor in memory at a time."""
    heads = {
        "attn_q": source.metadata["llama.attention.head_count"],
        "attn_k": source.metadata["llama.attention.head_count_kv"],
    }
    names = list(_tensor_names(source.metadata["llama.block_count"]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total_bytes = 0
    for theirs, ours in names:
        shape = source.tensors[theirs].shape
        end = total_bytes + 2 * math.prod(shape)
        header[ours] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [total_bytes, end]}
        total_bytes = end
    blob = json.dumps(header, separators=(",", ":")).encode()
    blob += b" " * (-len(blob) % 8)

    digest = hashlib.sha256()
    with path.open("wb") as file:

        def write(data: bytes) -> None:
            file.write(data)
            digest.update(data)

        write(struct.pack("<Q", len(blob)) + blob)
        for theirs, ours in names:
            tensor = source.tensor(theirs)
            kind = theirs.split(".")[-2]
            if kind in heads:
                tensor = _halved_rotary_rows(tensor, heads[kind])
            write(_bfloat16_bits(tensor).astype("<u2").tobytes())
            on_progress("converting the model", header[ours]["data_offsets"][1] / total_bytes)
    return digest.hexdigest()


def _halved_rotary_rows(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder q/k rows: llama.cpp pairs rotary dimensions as neighbours, Hugging Face as two halves of a head."""
    head_rows = weight.shape[0] // heads
    return weight.reshape(heads, head_rows // 2, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _model_config(metadata: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 8),
        "rope_scaling": None,
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": metadata["llama.vocab_size"],
    }


def _special_tokens(metadata: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {
        index: {
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, (text, kind) in enumerate(
            zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
        )
        if kind == _CONTROL_TOKEN
    }


def _tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """Byte-level BPE that splits numbers into digits: what GGUF names the 'smollm' pre-tokeniser."""
    if (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise ValueError("expected the tokenizer of SmolLM2")
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, **token} for index, token in _special_tokens(metadata).items()],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": {**byte_level, "trim_offsets": False},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: index for index, text in enumerate(metadata["tokenizer.ggml.tokens"])},
            "merges": [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(index): token for index, token in _special_tokens(metadata).items()},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        **{role: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()},
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _write_json(path: Path, content: dict[str, Any], indent: int | None = 2) -> None:
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
