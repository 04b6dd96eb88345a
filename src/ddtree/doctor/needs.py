"""What is to be started, as far as it matters for a machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree.errors import UserError

if TYPE_CHECKING:
    from ddtree.deploy.deployment import Deployment

_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


@dataclass(frozen=True)
class Needs:
    """None stands for what is not known or not decided.

    Attributes:
        weights_bytes: of target and drafter together.
        is_fetched: the weights are on the disk already.
        has_experts: the target is a mixture of experts.
        on_gpu: a GPU is needed.
        tp, ep: declared parallelism.
        nvls: NCCL shall reduce in the NVLink switch.
        needs_systemd: a unit is to be written.
    """

    weights_bytes: int | None = None
    is_fetched: bool = False
    has_experts: bool | None = None
    on_gpu: bool | None = None
    tp: int | None = None
    ep: int | None = None
    nvls: bool = False
    port: int | None = None
    needs_systemd: bool = False
    memory_fraction: float | None = None


def weights_of(folder: Path) -> int:
    """Bytes of the weights in a model folder.

    Raises:
        UserError: it holds none.
    """
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if not size:
        raise UserError(f"{folder} holds no .safetensors", "name a Hugging Face folder, or give --model-gb")
    return size


def has_experts(folder: Path) -> bool | None:
    """Whether `config.json`, or its text part, tells of experts."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        parts = [config, config.get("text_config") or {}]
        return any(isinstance(part.get(key), int) and part[key] > 1 for part in parts for key in _EXPERT_KEYS)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def needs_of_deployment(deployment: Deployment) -> Needs:
    """What a deployment file asks of its machine; weights are looked at where they are."""
    folders = [
        Path(weights.path)
        for weights in (deployment.model, deployment.drafter)
        if weights is not None and weights.path and Path(weights.path).is_dir()
    ]
    sizes = [weights_of(folder) for folder in folders]
    runtime, parallel = deployment.runtime, deployment.parallelism
    model = Path(deployment.model.path) if deployment.model.path else None
    return Needs(
        weights_bytes=sum(sizes) or None,
        is_fetched=bool(sizes),
        has_experts=has_experts(model) if model else None,
        on_gpu=runtime.device == "cuda",
        tp=parallel.tp,
        ep=parallel.ep,
        nvls=runtime.nvls,
        port=deployment.service.port,
        needs_systemd=deployment.service.supervisor == "systemd",
        memory_fraction=runtime.memory_fraction,
    )
