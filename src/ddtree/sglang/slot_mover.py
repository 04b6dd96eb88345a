"""Moves K/V of accepted paths in the pools that SGLang keeps them in."""

from collections.abc import Callable
from typing import Any

import torch

from ddtree.sglang.commit import Commit

STRIDED_POOLS = ("MHATokenToKVPool",)
"""Pools whose slots are runs of bytes at ``data_ptrs`` with ``data_strides``."""

INDEXED_POOLS = ("MLATokenToKVPool",)
"""Pools whose ``move_kv_cache`` reads all sources before it writes any target."""


class SlotMover:
    """Picks, once, how to move slots in ``pool``.

    Args:
        pool: SGLang's K/V pool of the target.

    Raises:
        ValueError: the pool is of a kind that is not known to move overlapping slots rightly.
    """

    def __init__(self, pool: Any) -> None:
        kind = type(pool).__name__
        self._move: Callable[[Commit], None]
        if kind in STRIDED_POOLS and not getattr(pool, "use_hnd", False):
            self._pointers, self._strides = pool.data_ptrs, pool.data_strides
            strides = self._strides.tolist()
            self._slot_bytes = max(strides)
            self._in_place = all(stride % 4 == 0 for stride in strides)
            self._move = self._move_strided if self._in_place else self._move_indexed
        elif kind in (*INDEXED_POOLS, *STRIDED_POOLS):
            self._move = self._move_indexed
        else:
            raise ValueError(
                f"DDTREE cannot move K/V in SGLang's {kind}: run without what brings it in "
                "(quantised, hybrid or unified K/V), or with --speculative-algorithm DFLASH"
            )
        self._pool = pool

    def __call__(self, commit: Commit) -> None:
        """Put the K/V of every accepted row to its place."""
        self._move(commit)

    def _move_strided(self, commit: Commit) -> None:
        from ddtree.sglang.slot_move_triton import move_slots

        move_slots(self._pointers, self._strides, self._slot_bytes, commit.source, commit.target, commit.lengths)

    def _move_indexed(self, commit: Commit) -> None:
        # SGLang's own move knows no lengths; a tail that is switched off has lengths of 0 and moves nothing.
        steps = torch.arange(commit.source.shape[1], device=commit.source.device)
        source = torch.where(steps < commit.lengths[:, None], commit.source, commit.target)
        self._pool.move_kv_cache(commit.target.flatten(), source.flatten())


def move_slots_twin(
    buffers: list[torch.Tensor], source: torch.Tensor, target: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Slow twin of `ddtree.sglang.slot_move_triton.move_slots` over the buffers themselves, ``[slots, ...]`` each."""
    live = torch.arange(source.shape[1], device=source.device) < lengths[:, None]
    read_from, write_to = source[live], target[live]
    for buffer in buffers:
        buffer[write_to] = buffer[read_from]
