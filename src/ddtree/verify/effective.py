"""What an engine says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SETTINGS = {
    "algorithm": "speculation algorithm",
    "budget": "budget (nodes of a tree, or length of a chain)",
    "top_k_cap": "top-k cap",
    "block_size": "block size",
    "draft_window": "draft window",
    "draft_temperature": "draft temperature",
    "cuda_graphs": "CUDA graphs",
    "model": "model",
    "drafter": "drafter",
    "model_revision": "commit of the model",
    "drafter_revision": "commit of the drafter",
    "model_config_sha256": "SHA-256 of the model's config.json",
    "drafter_config_sha256": "SHA-256 of the drafter's config.json",
    "context_length": "context length",
    "max_running_requests": "most running requests",
    "attention_backend": "attention backend",
    "nvls": "NVLS",
    "memory_fraction": "memory fraction",
    "tp": "tensor parallelism",
    "ep": "expert parallelism",
    "pp": "pipeline parallelism",
    "dp": "data parallelism",
    "dtype": "number format",
    "exact": "exact mode",
    "device": "device",
    "threads": "CPU threads",
}
"""Settings that can be declared and held against an engine's own, with their names for people."""


@dataclass(frozen=True)
class Effective:
    """An engine's own account.

    Attributes:
        settings: by the names in `SETTINGS`. A name that is not there is not known; None means off, or no limit.
        source: where the settings were read.
        identity: what tells this process from one started later, such as a boot id; empty where nothing does.
        device: `cpu`, `cuda` or None where not known.
        requested: settings that the process was started with, where it tells them apart from those in effect.
    """

    engine: str
    version: str | None
    model_name: str
    settings: Mapping[str, Any]
    source: str
    identity: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    requested: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Counters:
    """Totals since the process started; None where the engine does not tell.

    Attributes:
        verify_calls: verify rounds of sequences that carried a draft.
        proposed: drafted tokens (nodes).
        accepted: drafted tokens that were accepted.
        completion_tokens: generated tokens.
        prompt_tokens: prompt tokens.
        graph_replays: decode passes that were replays of a CUDA graph.
        eager_passes: decode passes that were not.
    """

    verify_calls: float | None = None
    proposed: float | None = None
    accepted: float | None = None
    completion_tokens: float | None = None
    prompt_tokens: float | None = None
    graph_replays: float | None = None
    eager_passes: float | None = None

    def since(self, before: Counters) -> Counters:
        """How far each moved."""
        moved = {
            name: None if now is None or (then := getattr(before, name)) is None else now - then
            for name, now in vars(self).items()
        }
        return Counters(**moved)

    @property
    def fell(self) -> tuple[str, ...]:
        """Of a difference: the totals that went backwards, which only a new process can explain."""
        return tuple(name for name, value in vars(self).items() if value is not None and value < 0)
