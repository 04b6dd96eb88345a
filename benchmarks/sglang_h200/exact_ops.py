"""An SGLang plugin for a benchmark: other kernels than the usual ones, by environment variable.

With ``EXACT_OPS`` set every layer is plain torch, so that a model can run in float32: layers that have a native form
use it and prebuilt bfloat16 kernels are left out. In float32 a tree's rows and plain decoding agree to about 1e-5, so
texts must be equal and draws can be held against exact probabilities; in bfloat16 both would only show rounding.
Experts stay with their kernel, whose native form cannot be captured in a graph.

With ``FLASHINFER_FA2_ONLY`` FlashInfer does without its Hopper kernels, which it compiles with CUTLASS at first use.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    if os.environ.get("EXACT_OPS"):
        use_native_layers()
    if os.environ.get("FLASHINFER_FA2_ONLY"):
        use_fa2()


def use_fa2() -> None:
    import flashinfer.utils

    flashinfer.utils.is_fa3_backend_supported = lambda *args: False


def use_native_layers() -> None:
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.models import utils

    usual = MultiPlatformOp.dispatch_forward

    def native(op: Any) -> Any:
        has_native = type(op).forward_native is not MultiPlatformOp.forward_native and "MoE" not in type(op).__name__
        return op.forward_native if has_native else usual(op)

    MultiPlatformOp.dispatch_forward = native
    memory_pool.can_use_store_cache = lambda size: False
    utils.can_use_fused_inplace_qknorm = lambda head_dim, dtype: False
