"""The fast kernels as a set: Triton and CUDA C++, for one NVIDIA GPU of compute capability 8.0 or newer.

This module imports without a GPU and without Triton; the kernels are imported at their first call.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import linear

from ddtree.kernels.kernel_set import KernelSet


@cache
def _load(module: str, name: str) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(import_module(f"ddtree.kernels.{module}"), name)
    return kernel


def lazy(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _load(module, name)(*args, **kwargs)

    call.__name__ = name
    call.__doc__ = f"`ddtree.kernels.{module}.{name}`, imported at the first call."
    return call


FAST = KernelSet(
    name="fast",
    linear=linear,
    rms_norm=lazy("norm_triton", "rms_norm"),
    add_rms_norm=lazy("norm_triton", "add_rms_norm"),
    rotate_and_write=lazy("rotary_triton", "rotate_and_write"),
    silu_mul=lazy("activation_triton", "silu_mul"),
    attend_input=lazy("layer_products_cuda", "attend_input"),
    feed_forward_input=lazy("layer_products_cuda", "feed_forward_input"),
    add_linear=lazy("layer_products_cuda", "add_linear"),
    write_context=lazy("rotary_triton", "write_context"),
    tree_attention=lazy("tree_attention_cuda", "TreeAttention"),
    top_log_probs=lazy("top_log_probs_cuda", "top_log_probs"),
    build_tree=lazy("tree_build_cuda", "build_tree"),
    choose=lazy("choose_cuda", "choose"),
    walk_tree=lazy("tree_walk_cuda", "walk_tree"),
    move_rows=lazy("paged_triton", "move_rows"),
    place_rows=lazy("placement_cuda", "place_rows"),
    advance=lazy("advance_cuda", "advance"),
    keep_taps=lazy("advance_cuda", "keep_taps"),
    hand_over=lazy("advance_cuda", "hand_over"),
    forecast=lazy("forecast_cuda", "forecast"),
    take_seats=lazy("seats_cuda", "take_seats"),
    embed_rows=lazy("embedding_cuda", "embed_rows"),
)


def products_of(
    kernels: KernelSet,
    hidden: int,
    middle: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, str] | None:
    """Which kernels make each product of a layer of these sizes; None where ``kernels`` are not the fast ones."""
    if kernels is not FAST:
        return None
    found: dict[str, str] = _load("layer_products_cuda", "describe")(
        hidden, middle, heads, kv_heads, head_dim, dtype, device
    )
    return found


def why_not_fast(device: torch.device) -> str | None:
    """Why the fast kernels can not run on ``device``, or None where they can."""
    if device.type != "cuda":
        return f"the device is {device.type}, not an NVIDIA GPU"
    if torch.version.cuda is None:
        return "this torch was not built for CUDA"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if find_spec("triton") is None:
        return "triton is not installed"
    return None
