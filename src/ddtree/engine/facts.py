"""What an engine is and how it runs, as plain values for people and for checks."""

from typing import Any

import torch

from ddtree.engine.speculation import Speculation
from ddtree.engine.state import DeviceState
from ddtree.kernels.exact_set import cost_of
from ddtree.kernels.fast_set import products_of
from ddtree.models.drafter import Drafter
from ddtree.models.target import Target


def describe(target: Target, drafter: Drafter | None, state: DeviceState, speculation: Speculation) -> dict[str, Any]:
    """Device, number format, sizes, and what of the checkpoints' configurations was read."""
    config = drafter.config if drafter else None
    block_size = config.block_size if config else None
    shape = speculation.resolve(block_size)
    caches = [state.target_cache] if state.drafter_cache is None else [state.target_cache, state.drafter_cache]
    return {
        "torch": torch.__version__,
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "kernels": target.kernels.name,
        "exact": target.kernels.is_exact,
        "exact_cost": cost_of(target.kernels),
        "layer_products": _layer_products(target),
        "threads": torch.get_num_threads(),
        "mode": speculation.mode,
        "budget": "auto" if shape.is_auto else shape.budget,
        "top_k_cap": shape.top_k,
        "block_size": block_size,
        "draft_window": state.draft_window,
        "draft_temperature": config.draft_temperature if config else None,
        "tap_layers": list(config.tap_layers) if config else None,
        "max_model_len": state.max_model_len,
        "cache_bytes": sum(cache.nbytes for cache in caches),
        "ignored_model_keys": list(target.config.ignored_keys),
        "ignored_draft_keys": list(config.ignored_keys) if config else None,
    }


def _layer_products(target: Target) -> dict[str, str] | None:
    """Which kernels make each product of the target's layers; None where they are the plain ones."""
    layer = target.config.layer
    return products_of(
        target.kernels, layer.hidden_size, layer.intermediate_size, layer.n_heads, layer.n_kv_heads, layer.head_dim,
        target.dtype, target.device,
    )  # fmt: skip
