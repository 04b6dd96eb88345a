"""The conversion to a Hugging Face folder, on a tiny model and (by its hash) on the real one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_target import HEADS, HIDDEN, gguf_bytes, sha256, source_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddtree.demo import target_folder
from ddtree.demo.convert import convert
from ddtree.demo.target import WEIGHTS_SHA256


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    digest = convert(gguf_bytes(tmp_path / "x.gguf"), folder)
    assert digest == sha256((folder / "model.safetensors").read_bytes())
    return folder


def test_weights_come_back_in_hugging_face_order(converted: Path) -> None:
    """Fails where q/k rows stay in llama.cpp's order, which a look at the text would not show."""
    ours, wanted = load_file(converted / "model.safetensors"), source_weights()
    assert ours.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(ours[name], torch.from_numpy(weight).to(torch.bfloat16), rtol=0, atol=0, msg=name)


def test_transformers_reads_the_folder(converted: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(converted, local_files_only=True)
    assert model.config.hidden_size == HIDDEN and model.config.num_attention_heads == HEADS
    assert model.dtype == torch.bfloat16
    assert tokenizer.decode(tokenizer.encode("ab 1")) == "ab 1"
    assert tokenizer.encode("<|im_start|>ab") == [1, 5]
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2


def test_the_real_target_has_the_expected_weights() -> None:
    folder = target_folder()
    with (folder / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == WEIGHTS_SHA256
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_the_real_tokenizer_round_trips() -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_folder(), local_files_only=True)
    text = "Zwölf Boxkämpfer: 12345, def f(x):\n\treturn x  # ✓"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("12345")) == 5  # digits stand alone
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert rendered.startswith("<|im_start|>system")
