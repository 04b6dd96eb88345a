"""The fast kernels as a set: Triton and CUDA C++, for one NVIDIA GPU of compute capability 8.0 or newer.

This module imports without a GPU and without Triton; the kernels are imported at their first call.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ddtree.kernels.kernel_set import KernelSet


@cache
def _load(module: str, name: str) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(import_module(f"ddtree.kernels.{module}"), name)
    return kernel


def _lazy(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _load(module, name)(*args, **kwargs)

    call.__name__ = name
    call.__doc__ = f"`ddtree.kernels.{module}.{name}`, imported at the first call."
    return call


FAST = KernelSet(
    name="fast",
    rms_norm=_lazy("norm_triton", "rms_norm"),
    add_rms_norm=_lazy("norm_triton", "add_rms_norm"),
    rotate_and_write=_lazy("rotary_triton", "rotate_and_write"),
    silu_mul=_lazy("activation_triton", "silu_mul"),
    attend_input=_lazy("layer_products_cuda", "attend_input"),
    feed_forward_input=_lazy("layer_products_cuda", "feed_forward_input"),
    add_linear=_lazy("layer_products_cuda", "add_linear"),
    write_context=_lazy("rotary_triton", "write_context"),
    tree_attention=_lazy("tree_attention_cuda", "TreeAttention"),
    top_log_probs=_lazy("top_log_probs_cuda", "top_log_probs"),
    build_tree=_lazy("tree_build_cuda", "build_tree"),
    choose=_lazy("choose_cuda", "choose"),
    walk_tree=_lazy("tree_walk_cuda", "walk_tree"),
    move_rows=_lazy("paged_triton", "move_rows"),
    place_rows=_lazy("placement_cuda", "place_rows"),
    advance=_lazy("advance_cuda", "advance"),
    keep_taps=_lazy("advance_cuda", "keep_taps"),
    forecast=_lazy("forecast_cuda", "forecast"),
)


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
