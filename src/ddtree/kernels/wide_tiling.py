"""How the products of a large model's layer are cut into programs."""

from dataclasses import dataclass
from typing import Literal

import torch

from ddtree.kernels.product_tiling import Chip

By = Literal["triton", "rows", "wgmma", "cublas"]
_MAX_ROWS: dict[By, int] = {"triton": 128, "rows": 1, "wgmma": 136}  # of one tile
_ROWS = ((1, 1), (2, 16), (17, 32), (33, 56), (57, 64), (65, 80), (81, 96), (97, 128))
"""Stretches of row counts that tiles were chosen for, as measured at 1, 16, 32, 48, 64, 72, 96 and 128 rows."""


@dataclass(frozen=True)
class WideTile:
    """How one product is cut.

    Attributes:
        columns: weight rows that a program takes; of a gated product half of them are gates, half their ups.
        depth: numbers of the inner axis that it takes at a time.
        splits: stretches of the inner axis that run side by side.
        stages: steps that are on their way from memory at a time.
        warps: of a program; by ``wgmma`` there are four for each 64 columns, and one that copies.
        by: all rows on tensor cores by Triton (16, 32 or 64 rows, or 64 and so many) or by CUDA C++ (``wgmma``, rows
            in eights); ``rows``: one row on ordinary arithmetic units; ``cublas``: as cuBLAS does it.
        early: kernels start while the one before still runs.
        calls_late: the kernel behind may start when the products are made, instead of at once.
        joined: programs add up their stretches among themselves instead of leaving it to a kernel behind; by ``wgmma``
            alone.
    """

    columns: int
    depth: int
    splits: int = 1
    stages: int = 4
    warps: int = 4
    by: By = "triton"
    early: bool = True
    calls_late: bool = False
    joined: bool = False

    @property
    def leaves_sums(self) -> bool:
        """Whether a kernel behind finishes the product: float32 sums of each stretch, or what cuBLAS made."""
        return (self.splits > 1 and not self.joined) or self.by == "cublas"

    def fits(self, rows: int, columns: int, size: int, gated: bool) -> bool:
        """Whether the product can be cut so; ``columns`` are all weight rows, ``size`` is the inner axis."""
        if self.by == "cublas":
            return True
        own = self.columns // 2 if gated else self.columns
        steps = size // self.depth
        even = columns % self.columns == 0 and size % self.depth == 0 and own >= 8
        even = even and rows <= _MAX_ROWS[self.by]
        if self.by == "rows":
            return even and self.splits == 1
        if self.by == "wgmma":
            even = even and self.columns % 64 == 0 and self.columns <= 256 and self.depth % 64 == 0
            even = even and (not self.joined or 1 < self.splits <= 8)
            even = even and self.shared_bytes(rows) <= Chip().shared_bytes
        # The last stretch may be shorter, but not empty.
        return even and (self.splits - 1) * -(-steps // self.splits) < steps

    def empty_result(self, x: torch.Tensor, columns: int, stream: torch.Tensor | None, gated: bool) -> torch.Tensor:
        """Where the product of ``x`` goes: sums of stretches if it leaves them, else ``stream``, else new rows."""
        rows = x.shape[0]
        if self.leaves_sums:
            return x.new_empty(self.splits, rows, columns, dtype=torch.float32)
        return x.new_empty(rows, columns // 2 if gated else columns) if stream is None else stream

    def shared_bytes(self, rows: int) -> int:
        """Shared memory that a program by ``wgmma`` takes: stages (or finished sums), barriers, what aligns them."""
        held = rows_in_eights(rows)
        stages, sums = 2 * self.depth * (self.columns + held) * self.stages, 4 * held * (self.columns + 4)
        return max(stages, sums) + 16 * self.stages + 1024


CUBLAS = WideTile(0, 0, by="cublas")
"""For products of any size."""


def rows_in_eights(rows: int) -> int:
    """Rows of the tile by ``wgmma`` that holds ``rows``."""
    return -(-rows // 8) * 8


def _deep(splits: int, stages: int = 8, depth: int = 128, late: bool = False) -> WideTile:
    """About one program a multiprocessor, which has most of its shared memory for steps on their way."""
    return WideTile(64, depth, splits, stages, calls_late=late)


def _by_rows(columns: int, depth: int, warps: int = 4, late: bool = False) -> WideTile:
    return WideTile(columns, depth, warps=warps, by="rows", calls_late=late)


def _wgmma(columns: int, depth: int, splits: int, stages: int, joined: bool = False, late: bool = False) -> WideTile:
    return WideTile(columns, depth, splits, stages, by="wgmma", joined=joined, calls_late=late)


_MEASURED: dict[tuple[str, int, int], tuple[WideTile | None, ...]] = {
    # Whole layers with attention on one H200 (`benchmarks/wide_h200.py tune --by both`), a tile for each stretch of row
    # counts; None where cuBLAS is as fast. Qwen3-8B:
    ("attend_input", 6144, 4096): (
        _wgmma(192, 64, 4, 9, late=True), _wgmma(192, 64, 4, 8), _deep(1, 4, 256), _wgmma(192, 64, 4, 7), _deep(1, 5),
        _wgmma(192, 64, 4, 6), _deep(1, 5, late=True), None,
    ),
    ("add_linear", 4096, 4096): (
        _by_rows(16, 1024, 8), _wgmma(64, 256, 2, 5, joined=True), _deep(2, 4, 256, late=True), _deep(2, 5, late=True),
        _deep(2, 5, late=True), None, _deep(2, 5), _deep(2, 4),
    ),
    ("feed_forward_input", 24576, 4096): (
        _wgmma(192, 128, 1, 4), _wgmma(192, 128, 1, 4), _wgmma(192, 128, 1, 4), _wgmma(192, 128, 1, 3),
        WideTile(64, 64, calls_late=True), _wgmma(192, 64, 1, 6), None, None,
    ),
    ("add_linear", 4096, 12288): (
        _wgmma(64, 256, 2, 6, joined=True), _wgmma(64, 256, 2, 5, joined=True), _deep(2, 4, 256), _deep(2, 5),
        _deep(2, 5), _deep(2, 6), _deep(2, 5), _deep(2, 4),
    ),
    # Qwen3-4B:
    ("attend_input", 6144, 2560): (
        _wgmma(192, 64, 4, 9, late=True), _wgmma(192, 64, 4, 8, late=True), _deep(1, 4, 256), _deep(1, 6), _deep(1, 6),
        _deep(1, 6), _deep(1, 5), None,
    ),
    ("add_linear", 2560, 4096): (
        _by_rows(8, 1024, late=True), _deep(3), _deep(3, 4, 256, late=True), _deep(3, 8, 64, late=True),
        _deep(3, 5, late=True), WideTile(128, 128, 6, 4), _deep(3, 5), _deep(3, 4),
    ),
    ("feed_forward_input", 19456, 2560): (
        _wgmma(256, 64, 3, 3), WideTile(128, 128, stages=5), WideTile(128, 64, stages=5, calls_late=True),
        WideTile(128, 64), WideTile(64, 64, calls_late=True), _wgmma(256, 64, 1, 5), None, None,
    ),
    ("add_linear", 2560, 9728): (
        _wgmma(64, 64, 3, 16), _deep(3, 5, 256), _deep(3, 4, 256, late=True), _deep(3, 5, late=True),
        _deep(3, 5, late=True), _deep(3, 6, late=True), _deep(3, 5, late=True), _deep(3, 4),
    ),
}  # fmt: skip


def wide_tile(kind: str, rows: int, columns: int, size: int) -> WideTile | None:
    """The tile that was measured to be faster than cuBLAS; None where there is none.

    Args:
        kind: the kernel's name in `ddtree.kernels.layer_products`.
        rows, columns, size: of the product.
    """
    measured = _MEASURED.get((kind, columns, size), ())
    return next((tile for (least, most), tile in zip(_ROWS, measured, strict=False) if least <= rows <= most), None)


def streamed_rows(kind: str, columns: int, size: int) -> list[str]:
    """Stretches of row counts at which the product has a tile; arguments as of `wide_tile`."""
    return [
        f"{least}-{most}" if least < most else str(most)
        for least, most in _ROWS
        if wide_tile(kind, most, columns, size) is not None
    ]
