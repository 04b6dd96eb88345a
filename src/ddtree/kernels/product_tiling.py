"""How the fused products of a layer are cut into blocks."""

from dataclasses import dataclass
from functools import cache

import torch

MAX_ROWS = 136
"""Rows that there are tilings for."""
_ROW_BUCKETS = (8, 16, 24, 32, 40, 64, 72, 128, MAX_ROWS)
"""Row counts are rounded up to one of these, so that few kernels are compiled."""
_MAX_WARPS = 16
_MAX_REGISTERS = 72  # of a thread, for its inputs

_MEASURED = {
    # SmolLM2-135M, whole passes on an H200 (`benchmarks/layers_h200.py tune`): (tiles, row_tiles) for each bucket.
    ("attend_input", 960, 576): ((4, 1), (4, 1), (4, 2), (2, 2), (8, 2), (4, 4), (2, 3), (2, 4), (4, 2)),
    ("add_linear", 576, 576): ((2, 1), (3, 2), (1, 1), (4, 2), (2, 2), (2, 2), (2, 2), (3, 2), (3, 2)),
    ("feed_forward_input", 3072, 576): ((6, 1), (4, 2), (3, 3), (6, 2), (6, 2), (6, 2), (8, 2), (8, 2), (4, 2)),
    ("add_linear", 576, 1536): ((1, 1), (1, 2), (4, 1), (4, 1), (4, 1), (2, 4), (2, 4), (3, 4), (3, 4)),
}


@dataclass(frozen=True)
class Chip:
    """What of a GPU bears on tilings; an H200's where there is none.

    Attributes:
        processors: its multiprocessors.
        shared_bytes: shared memory that a block may have.
    """

    processors: int = 132
    shared_bytes: int = 227 * 1024


@cache
def chip_of(device: torch.device) -> Chip:
    """The chip of ``device``."""
    if device.type != "cuda":
        return Chip()
    facts = torch.cuda.get_device_properties(device)
    # Of each block the system keeps 1 KiB for itself.
    return Chip(facts.multi_processor_count, facts.shared_memory_per_multiprocessor - 1024)


@dataclass(frozen=True)
class Tiling:
    """How a product is cut into blocks.

    Attributes:
        tiles: tiles of 8 weight rows a block takes.
        row_tiles: tiles of 8 input rows a block takes.
        warps: warps of a block; they split the product's inner axis.
    """

    tiles: int
    row_tiles: int
    warps: int

    def shared_bytes(self, size: int) -> int:
        """For a product over ``size``: the warps' sums, sums of squares, weights of the norm and of the product."""
        pieces = self.warps * -(-(size // 32) // self.warps)
        sums = 4 * self.warps * 8 * self.row_tiles * (8 * self.tiles + 1)
        return sums + 2 * size + 64 * pieces * 8 * self.tiles


def is_measured(kind: str, columns: int, size: int) -> bool:
    """Whether tilings of the product were measured, which then win at all row counts that there are tilings for."""
    return (kind, columns, size) in _MEASURED


def warps_for(size: int) -> int:
    """Warps that split an inner axis of ``size``: a function of it alone, so that sums do not depend on the rows."""
    pieces = size // 32
    each = -(-pieces // _MAX_WARPS)
    return -(-pieces // each)


def tilings(
    kind: str, rows: int, columns: int, size: int, chip: Chip, head_dim: int = 0, whole_heads: bool = False
) -> list[Tiling]:
    """All tilings that a product can have.

    Args:
        kind: the kernel's name.
        rows, columns, size: of the product.
        head_dim: of `attend_input`.
        whole_heads: a block takes all columns of a head, since it norms them.
    """
    if size % 32 or (kind == "attend_input" and head_dim not in (64, 128)):
        return []
    warps = warps_for(size)
    each = -(-(size // 32) // warps)
    found = []
    for tiles in (head_dim // 8,) if whole_heads else (1, 2, 3, 4, 6, 8):
        if columns % (8 * tiles) or (kind == "feed_forward_input" and columns // 2 % (4 * tiles)):
            continue
        if kind == "attend_input" and head_dim % (8 * tiles):
            continue
        for row_tiles in range(1, min(-(-rows // 8), 8) + 1):
            one = Tiling(tiles, row_tiles, warps)
            pairs = 8 * row_tiles * 4 * tiles // (1 if kind == "add_linear" else 2)  # each is one thread's
            fits = 4 * row_tiles * each <= _MAX_REGISTERS and one.shared_bytes(size) <= chip.shared_bytes
            if pairs <= 32 * warps and fits:
                found.append(one)
    return found


@cache
def tiling(
    kind: str, rows: int, columns: int, size: int, chip: Chip, head_dim: int = 0, whole_heads: bool = False
) -> Tiling | None:
    """The tiling that was measured to be the best one, else that by which the busiest multiprocessor reads least.

    Returns:
        None where there is no tiling; see `tilings`.
    """
    bucket = next((i for i, most in enumerate(_ROW_BUCKETS) if rows <= most), None)
    if bucket is None:
        return None
    rows = _ROW_BUCKETS[bucket]
    possible = tilings(kind, rows, columns, size, chip, head_dim, whole_heads)
    if (measured := _MEASURED.get((kind, columns, size))) is not None:
        best = Tiling(*measured[bucket], warps_for(size))
        if best in possible:
            return best

    def cost(one: Tiling) -> int:
        blocks = columns // (8 * one.tiles) * -(-rows // (8 * one.row_tiles))
        # Weights are read ahead, so they count half; a block costs about as much as 12 rows.
        return -(-blocks // chip.processors) * (8 * one.row_tiles + 4 * one.tiles + 12)

    return min(possible, key=cost, default=None)
