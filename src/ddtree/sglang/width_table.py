"""What was found out about verify widths on this machine, kept in the user's cache: which start, and how fast they are.

A table holds for one key: device, models, versions and whatever else decides the cost of a verify pass.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddtree.disk import write_whole
from ddtree.user_cache import cache_folder

KEY_FIELDS = (
    "model_path", "revision", "speculative_draft_model_path", "speculative_draft_model_revision", "dtype",
    "quantization", "kv_cache_dtype", "attention_backend", "prefill_attention_backend", "decode_attention_backend",
    "speculative_draft_attention_backend", "page_size", "tp_size", "ep_size", "nnodes", "moe_runner_backend",
    "moe_a2a_backend", "disable_custom_all_reduce", "enable_nccl_nvls", "disable_cuda_graph", "cuda_graph_bs_decode",
    "cuda_graph_max_bs_decode", "disable_overlap_schedule", "max_running_requests", "speculative_dflash_block_size",
    "speculative_draft_window_size",
)  # fmt: skip
"""Fields of SGLang's ServerArgs that decide what a width costs, as they stand when the budget is chosen."""

MODEL_FIELDS = ("model_path", "speculative_draft_model_path")

DENSE_BUDGETS = (8, 16, 32, 64)
MOE_BUDGETS = (4, 8, 16)
CONCURRENCIES = (1, 4, 16)
CLOSE = 0.02
"""Speeds that differ by less are alike, and the narrower tree wins: it leaves more of the GPU to others."""


@dataclass
class WidthRow:
    """One budget.

    Attributes:
        starts: whether a server with it came up, its graphs captured.
        tok_s: tokens a second of all requests together, by concurrency; empty where it was not measured.
    """

    starts: bool
    tok_s: dict[int, float] = field(default_factory=dict)


@dataclass
class WidthTable:
    """Rows by budget, for one key."""

    key: dict[str, Any]
    rows: dict[int, WidthRow] = field(default_factory=dict)

    @classmethod
    def load(cls, key: dict[str, Any]) -> WidthTable:
        """The kept table, or an empty one; a file that cannot be read counts as none."""
        try:
            kept = json.loads(table_path(key).read_text(encoding="utf-8"))
            rows = {
                int(budget): WidthRow(bool(row["starts"]), {int(c): float(t) for c, t in row["tok_s"].items()})
                for budget, row in kept["rows"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            rows = {}
        return cls(key, rows)

    def save(self) -> Path:
        """Write it, whole or not at all; where it lies now."""
        path = table_path(self.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = {budget: asdict(row) for budget, row in sorted(self.rows.items())}
        write_whole(path, json.dumps({"key": self.key, "rows": rows}, indent=1))
        return path

    def best_budget(self, concurrency: int) -> int | None:
        """The fastest budget at the measured concurrency nearest to ``concurrency``; None where none was measured."""
        speeds = {budget: at(row.tok_s, concurrency) for budget, row in self.rows.items() if row.starts and row.tok_s}
        if not speeds:
            return None
        top = max(speeds.values())
        return min(budget for budget, speed in speeds.items() if speed >= (1 - CLOSE) * top)


def at(tok_s: Mapping[int, float], concurrency: int) -> float:
    """The speed at the measured concurrency whose ratio to ``concurrency`` is nearest to 1; ties go to the lower."""
    return tok_s[min(sorted(tok_s), key=lambda c: max(c / concurrency, concurrency / c))]


def table_path(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / "sglang-widths" / f"{digest}.json"


def width_key(
    fields: Mapping[str, Any], device: str, versions: Mapping[str, str], shape: Mapping[str, Any]
) -> dict[str, Any]:
    """The key of a server.

    Args:
        fields: `KEY_FIELDS` of SGLang's arguments.
        device: name of the GPU.
        versions: of SGLang, torch and ddtree.
        shape: what else of our own settings decides the cost.
    """
    told = {name: fields.get(name) for name in KEY_FIELDS}
    told["page_size"] = told["page_size"] or 1  # SGLang fills it in later
    stamps = {f"{name}_files": folder_stamp(told[name]) for name in MODEL_FIELDS}
    return {"device": device, "versions": dict(sorted(versions.items())), **shape, **told, **stamps}


def folder_stamp(path: str | None) -> str | None:
    """Changes when a model folder's files do: a digest of names, sizes and times; None for a model of a hub."""
    folder = Path(path or "")
    if not path or not folder.is_dir():
        return None
    files = sorted((*folder.glob("*.json"), *folder.glob("*.safetensors")))
    told = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def candidates(config: Any) -> tuple[int, ...]:
    """Budgets worth trying for a target: few for mixtures of experts, where each node brings experts of its own."""
    for part in (config, getattr(config, "text_config", None)):
        for name in ("n_routed_experts", "num_experts", "num_local_experts"):
            if int(getattr(part, name, None) or 0) > 1:
                return MOE_BUDGETS
    return DENSE_BUDGETS
