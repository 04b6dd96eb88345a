"""Prompts to measure with."""

import json
from pathlib import Path


def read_prompts(folder: Path, names: tuple[str, ...], count: int) -> list[list[dict[str, str]]]:
    rows = []
    for name in names:
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        rows += [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]
    return rows
