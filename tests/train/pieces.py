"""What tests of training data share: tiny targets, prompt files, and how conversations are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddtree.train.data_request import DataRequest
from ddtree.train.shards import open_shards
from tiny_models import make_target

Row = tuple[int, str, tuple[int, ...], int, bool]


def tiny_target(folder: Path, family: str = "llama", **settings: Any) -> Path:
    """A target whose random answers end now and then."""
    return make_target(folder, family, **settings)


def write_prompts(path: Path, turns: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns))
    return path


def letters(number: int) -> str:
    """Words of the tiny tokenizer's alphabet, other ones for each number."""
    return " ".join(chr(97 + (number * 7 + i * (3 + number)) % 26) * (1 + (number + i) % 3) for i in range(6))


def small_request(folder: Path, **changes: Any) -> DataRequest:
    """A request that takes a second, on a target and prompts that are made beside it."""
    target = folder / "target"
    if not target.exists():
        tiny_target(target)
    if not (folder / "first.jsonl").exists():
        write_prompts(folder / "first.jsonl", [letters(i) for i in range(12)])
        write_prompts(folder / "second.jsonl", [letters(i) for i in range(40, 45)])
    wanted: dict[str, Any] = {
        "model": target,
        "prompts": ((folder / "first.jsonl", 2.0), (folder / "second.jsonl", 1.0)),
        "out": folder / "data",
        "answer_tokens": 900,
        "max_prompt_tokens": 40,
        "max_answer_tokens": 24,
        "shard_draws": 16,
        "seats": 6,
        "device": "cpu",
        "dtype": "float32",
    }
    return DataRequest(**wanted | changes)


def conversations(folder: Path) -> list[Row]:
    """Everything in a folder: number, source, tokens, where the answer starts, greedy or not."""
    found = open_shards(folder)
    return [
        (found.draw(i), found.source(i), tuple(found.tokens(i).tolist()), found.answer_start(i), found.greedy(i))
        for i in range(len(found))
    ]
