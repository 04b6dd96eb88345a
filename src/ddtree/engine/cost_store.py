"""Times of rounds, kept between starts in the user's cache folder."""

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

from ddtree.disk import write_whole
from ddtree.user_cache import cache_folder

DECIDING = (
    "model_config_sha256", "draft_config_sha256", "dtype", "kernels", "exact", "threads", "block_size",
    "draft_window",
)  # fmt: skip


class CostStore:
    """What rounds of each batch and budget cost on this machine with these models.

    Args:
        facts: `Engine.facts`, of which only what decides the cost counts; device and versions are added here.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        on_gpu = str(facts.get("device", "")).startswith("cuda")
        device = torch.cuda.get_device_name() if on_gpu else _processor()
        decides = {key: facts.get(key) for key in DECIDING} | {"name": device, "torch": torch.__version__}
        self._name = hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def load(self) -> dict[tuple[int, int], float]:
        """Milliseconds by batch and budget; empty where nothing is kept."""
        try:
            rows = json.loads(self._path().read_text())
            return {(int(batch), int(budget)): float(ms) for batch, budget, ms in rows if float(ms) > 0}
        except (OSError, ValueError, TypeError):
            return {}

    def save(self, cost_ms: dict[tuple[int, int], float]) -> None:
        """Keep the table; where that cannot be, the next start measures again."""
        try:
            path = self._path()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps([[*key, ms] for key, ms in sorted(cost_ms.items())]))
        except OSError:
            return

    def _path(self) -> Path:
        return cache_folder() / "costs" / f"{self._name}.json"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
