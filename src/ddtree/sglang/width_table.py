"""What was found out about verify widths on this machine, kept in the user's cache: which start, and how fast they are.

A table holds for one key: device, models, versions and whatever else decides the cost of a verify pass.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddtree.user_cache import cache_folder

KEY_FIELDS = (
    "model_path", "revision", "speculative_draft_model_path", "speculative_draft_model_revision", "dtype",
    "quantization", "kv_cache_dtype", "attention_backend", "page_size", "tp_size", "ep_size", "nnodes",
    "disable_cuda_graph", "disable_overlap_schedule", "speculative_draft_window_size",
)  # fmt: skip
"""Fields of SGLang's ServerArgs that decide what a width costs."""

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
        part = path.with_suffix(f".{os.getpid()}.part")
        with part.open("w", encoding="utf-8") as out:
            json.dump(
                {"key": self.key, "rows": {b: asdict(row) for b, row in sorted(self.rows.items())}}, out, indent=1
            )
            out.flush()
            os.fsync(out.fileno())
        part.replace(path)
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


def width_key(fields: Mapping[str, Any], device: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """The key of a server.

    Args:
        fields: SGLang's arguments by name, from its ServerArgs or its ``/server_info``.
        device: name of the GPU.
        versions: of SGLang, torch and ddtree.
    """
    told = {name: fields.get(name) for name in KEY_FIELDS}
    told["page_size"] = told["page_size"] or 1  # SGLang fills it in later
    return {"device": device, "versions": dict(sorted(versions.items())), **told}


def candidates(config: Any) -> tuple[int, ...]:
    """Budgets worth trying for a target: few for mixtures of experts, where each node brings experts of its own."""
    for part in (config, getattr(config, "text_config", None)):
        for name in ("n_routed_experts", "num_experts", "num_local_experts"):
            if int(getattr(part, name, None) or 0) > 1:
                return MOE_BUDGETS
    return DENSE_BUDGETS
