"""Attention of a round's rows over the paged cache and over each other, in CUDA C++ for tensor cores and clusters.

Packed query rows (row by row, the heads that share a key head below one another) are cut into tiles; a cluster of
blocks takes a tile, every block a stretch of the keys, and puts its parts together in its shared memory, so that one
launch does it all and nothing of it passes through global memory.
"""

from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import torch

from ddtree.kernels.cuda_module import cuda_module
from ddtree.kernels.tensor_map import TensorMap, tensor_map

SOURCE = "tree_attention.cu"
_LOG2_E = 1.4426950408889634
_NO_WINDOW = 1 << 30


@dataclass(frozen=True)
class Tiling:
    """How one launch is cut; the names of the source's macros.

    Attributes:
        cluster: blocks that share a tile of rows.
        warps_k: key groups of a block.
        warps_m: warps side by side over a tile's rows.
        rows_16: 16-row tiles a warp holds.
        keys: keys a step.
        stages: steps in flight, plus one.
        wide: multiply by warpgroups (Hopper's wgmma) what its copy engine brings; wants a head size of 128, ``warps_m``
            a multiple of 4, ``rows_16`` 1, ``keys`` 64 and at most 8 ``stages``. More than 8 warps have too few
            registers each.
    """

    cluster: int
    warps_k: int
    warps_m: int
    rows_16: int
    keys: int
    stages: int
    wide: bool = False

    @property
    def tile_rows(self) -> int:
        """Packed rows of a tile."""
        return 16 * self.rows_16 * self.warps_m

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_m * self.warps_k

    def shared_bytes(self, packed_rows: int, head_dim: int) -> int:
        """Dynamic shared memory of a block: the steps in flight, in whose place its groups' parts come afterwards."""
        rows = min(packed_rows, self.tile_rows)
        stages = self.warps_k * self.stages * 4 * self.keys * head_dim
        if self.cluster * self.warps_k == 1:
            parts = weights = 0
        else:
            parts, weights = self.warps_k * rows * (head_dim + 16) * 4, (self.warps_k + 1) * rows * 8
        barriers = self.warps_k * self.stages * 4 * 8 if self.wide else 0
        return max(stages, parts) + weights + barriers

    def macros(self, packed_rows: int, head_dim: int, groups: int) -> dict[str, int]:
        """What is fixed when the kernel is compiled; ``groups`` are the query heads that share a key head."""
        return {
            "HEAD_DIM": head_dim, "GROUPS": groups, "CLUSTER": self.cluster, "WARPS_K": self.warps_k,
            "WARPS_M": self.warps_m, "ROWS_16": self.rows_16, "KEYS": self.keys, "STAGES": self.stages,
            "PART_ROWS": min(self.tile_rows, packed_rows), "WIDE": int(self.wide),
        }  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What a device can do.

    Attributes:
        cluster: blocks that a cluster may have.
        shared_bytes: shared memory of a block.
        wgmma: whether it multiplies by warpgroups.
    """

    cluster: int
    shared_bytes: int
    wgmma: bool


def choose_tiling(packed_rows: int, places: int, head_dim: int, keys_bound: int, limits: Limits) -> Tiling:
    """The tiling of a shape, from what was fastest on an H200.

    Args:
        packed_rows: rows times the query heads that share a key head.
        places: sequences times key heads, each with tiles of its own.
        head_dim: 64 or 128.
        keys_bound: no row sees more keys.
        limits: of the device.
    """
    tiles_16 = -(-packed_rows // 16)
    widest = min(limits.cluster, 8)
    blocks = 100  # to aim at; a cluster is doubled until there are so many
    if tiles_16 == 1:
        tiling = Tiling(1, 4, 1, 1, 16, 2) if head_dim == 64 else Tiling(1, 8, 1, 1, 16, 3)
        blocks = 100 if head_dim == 64 else 64
    elif head_dim == 128 and limits.wgmma:
        # Warpgroups of 64 rows; so many key groups that there are about as many as an H200 has multiprocessors.
        units = -(-packed_rows // 64) * places
        groups = 1
        while groups * 2 <= min(widest, 160 // units):
            groups *= 2
        warps_k = 2 if groups in (2, 4) else 1
        tiling = Tiling(groups // warps_k, warps_k, 4, 1, 64, 3, wide=True)
        units_of_128 = -(-packed_rows // 128) * places
        if 192 < packed_rows <= 256 and units_of_128 * 4 <= 96 and widest >= 4 and keys_bound >= 1024:
            tiling = Tiling(4, 1, 8, 1, 64, 4, wide=True)
        elif packed_rows > 256 and units * 2 <= 132 and widest >= 2:
            tiling = Tiling(2, 2, 4, 1, 64, 3, wide=True)
        elif packed_rows > 384 and units_of_128 * 2 <= 132 and widest >= 2:
            tiling = Tiling(2, 1, 8, 1, 64, 3, wide=True)
        return _shrunk(tiling, packed_rows, head_dim, limits)
    elif head_dim == 128:
        tiling = Tiling(1, 2, tiles_16, 1, 32, 2) if tiles_16 <= 5 else Tiling(1, 1, 6, 1, 64, 2)
    elif tiles_16 * places <= 60:
        if tiles_16 <= 3:
            tiling = Tiling(1, 4, 1, 1, 16, 2)
        else:
            tiling, blocks = Tiling(1, 8, 1, 1, 16, 2) if tiles_16 <= 6 else Tiling(1, 4, 2, 1, 32, 2), 48
    elif tiles_16 <= 4:
        tiling = Tiling(1, 2, 2, 1, 32, 2)
    else:
        tiling, blocks = Tiling(1, 1, 4, 1, 64, 3), 64
    tiles = -(-tiles_16 // tiling.warps_m)
    cluster = 1
    while cluster * 2 <= widest and cluster * tiles * places < blocks and cluster * tiling.keys < keys_bound:
        cluster *= 2
    return _shrunk(replace(tiling, cluster=cluster), packed_rows, head_dim, limits)


def _shrunk(tiling: Tiling, packed_rows: int, head_dim: int, limits: Limits) -> Tiling:
    """The tiling with fewer steps in flight or key groups where a block's shared memory is too small for it."""
    while tiling.shared_bytes(packed_rows, head_dim) > limits.shared_bytes:
        if tiling.stages > 2:
            tiling = replace(tiling, stages=tiling.stages - 1)
        elif tiling.warps_k > 1:
            tiling = replace(tiling, warps_k=tiling.warps_k // 2)
        else:
            tiling = replace(tiling, keys=tiling.keys // 2, wide=False)
    return tiling


@cache
def device_limits(device: torch.device) -> Limits:
    """Limits of a device; a cluster of 0 blocks where it has none. The CPU's emulation is like an H200."""
    if device.type != "cuda":
        return Limits(8, 227 * 1024, True)
    capability = torch.cuda.get_device_capability(device)
    # 99 KiB is the least of all devices with clusters.
    shared = int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 * 1024))
    return Limits(8 if capability >= (9, 0) else 0, shared, capability == (9, 0))


def _pack_seen(ancestors: torch.Tensor) -> torch.Tensor:
    """A bool matrix ``[batch, rows, rows]`` as bits, int32 ``[batch, rows, ceil(rows / 32)]``; a lone row stays."""
    ancestors = ancestors.contiguous().view(torch.uint8)
    batch, rows, _ = ancestors.shape
    if rows == 1:
        return ancestors
    words = -(-rows // 32)
    seen = torch.empty(batch, rows, words, dtype=torch.int32, device=ancestors.device)
    cuda_module("pack_seen.cu", ancestors.device).launch(
        "pack_seen", (-(-batch * rows * words // 8), 1, 1), 256, 0, ancestors, seen, batch * rows * words, rows
    )
    return seen


class TreeAttention:
    """See `ddtree.kernels.tree_attention.TreeAttention`.

    The kernel serves bfloat16 with head sizes 64 and 128, pages of 16 tokens or more (a power of 2), on GPUs with
    clusters (compute capability 9.0 or newer). Every other call goes to `ddtree.kernels.tree_attention_triton`.

    Attributes:
        tiling: cut launches so, instead of as `choose_tiling` says.
    """

    tiling: Tiling | None = None

    def __init__(
        self,
        block_table: torch.Tensor,
        committed: torch.Tensor,
        depths: torch.Tensor,
        ancestors: torch.Tensor,
        page_tokens: int,
        context_bound: int,
        context_window: int | None,
        dtype: torch.dtype,
    ) -> None:
        self._arguments = (block_table, committed, depths, ancestors, page_tokens, context_bound, context_window, dtype)
        self._other: Any = None
        self._block_table = block_table.contiguous()
        self._committed = committed.contiguous()
        self._depths = depths.contiguous()
        self._seen = _pack_seen(ancestors) if self._is_served(dtype) else None
        self._page_tokens = page_tokens
        self._context_window = _NO_WINDOW if context_window is None else context_window
        self._keys_bound = min(context_bound, self._context_window) + depths.shape[1]

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sliding_window: int | None
    ) -> torch.Tensor:
        """See the twin."""
        batch, rows, heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        page = self._page_tokens
        if self._seen is None or query.dtype != torch.bfloat16 or head_dim not in (64, 128):
            return self._elsewhere(query, keys, values, sliding_window)
        groups = heads // kv_heads
        tiling = self.tiling or choose_tiling(
            rows * groups, batch * kv_heads, head_dim, self._keys_bound, device_limits(query.device)
        )
        macros = tiling.macros(rows * groups, head_dim, groups)
        module = cuda_module(SOURCE, query.device, **macros)
        query = query.contiguous()
        out = torch.empty_like(query)
        caches: tuple[torch.Tensor | TensorMap, ...] = (keys, values)
        if tiling.wide:
            box_keys = min(page, tiling.keys)
            caches = tuple(tensor_map(cache.view(-1, kv_heads * head_dim), box_keys, 256) for cache in (keys, values))
        blocks = -(-rows * groups // tiling.tile_rows) * tiling.cluster
        shared_bytes = tiling.shared_bytes(rows * groups, head_dim)
        module.launch(
            "tree_attention", (blocks, kv_heads, batch), tiling.threads, shared_bytes,
            query, *caches, out, self._block_table, self._committed, self._depths, self._seen,
            rows, kv_heads, self._block_table.shape[1], page.bit_length() - 1, head_dim**-0.5 * _LOG2_E,
            self._context_window, _NO_WINDOW if sliding_window is None else sliding_window,
        )  # fmt: skip
        return out.view(batch, rows, heads * head_dim)

    def _is_served(self, dtype: torch.dtype) -> bool:
        page = self._arguments[4]
        pages_fit = page >= 16 and not page & (page - 1)
        return dtype == torch.bfloat16 and pages_fit and device_limits(self._depths.device).cluster > 0

    def _elsewhere(self, *arguments: Any) -> torch.Tensor:
        if self._other is None:
            self._other = import_module("ddtree.kernels.tree_attention_triton").TreeAttention(*self._arguments)
        result: torch.Tensor = self._other(*arguments)
        return result
