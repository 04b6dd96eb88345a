"""How the products of a large model's layer are cut into programs."""

from dataclasses import dataclass

MAX_ROWS = 128
"""Rows that one tile can have."""
_ROWS = ((1, 1), (2, 16), (17, 32), (57, 64))
"""Stretches of row counts that tiles were chosen for. Tiles have 16, 32 or 64 rows: with fewer rows they do work for
rows that are not there, where cuBLAS has tiles of other sizes. The tile of 128 rows did not win by 2 %, and with 72
rows it lost 17 %."""


@dataclass(frozen=True)
class WideTile:
    """How one product is cut.

    Attributes:
        columns: weight rows that a program takes; of a gated product half of them are gates, half their ups.
        depth: numbers of the inner axis that it takes at a time.
        splits: stretches of the inner axis that run side by side.
        stages: steps that are on their way from memory at a time.
        warps: of a program.
        by_rows: one row at a time on ordinary arithmetic units instead of all rows on tensor cores.
        early: kernels start while the one before still runs.
        calls_late: the kernel behind may start when the products are made, instead of at once.
    """

    columns: int
    depth: int
    splits: int = 1
    stages: int = 4
    warps: int = 4
    by_rows: bool = False
    early: bool = True
    calls_late: bool = False

    def fits(self, rows: int, columns: int, size: int, gated: bool) -> bool:
        """Whether the product can be cut so; ``columns`` are all weight rows, ``size`` is the inner axis."""
        own = self.columns // 2 if gated else self.columns
        steps = size // self.depth
        even = columns % self.columns == 0 and size % self.depth == 0 and own >= 8
        if self.by_rows:
            return even and rows == 1 and self.splits == 1
        # The last stretch may be shorter, but not empty.
        return even and rows <= MAX_ROWS and (self.splits - 1) * -(-steps // self.splits) < steps


def _deep(splits: int, stages: int = 8, depth: int = 128, calls_late: bool = False) -> WideTile:
    """About one program a multiprocessor, which has most of its shared memory for steps on their way."""
    return WideTile(64, depth, splits, stages, calls_late=calls_late)


def _by_rows(columns: int, depth: int, warps: int = 4) -> WideTile:
    return WideTile(columns, depth, warps=warps, by_rows=True)


_MEASURED: dict[tuple[str, int, int], tuple[WideTile | None, ...]] = {
    # Whole layers with attention on one H200 (`benchmarks/wide_h200.py tune`), a tile for each stretch of row counts;
    # None where cuBLAS and the kernels around it are as fast. Qwen3-8B:
    ("attend_input", 6144, 4096): (_by_rows(16, 512, 8), WideTile(64, 128, 2), WideTile(64, 128, 2), _deep(1, 5)),
    ("add_linear", 4096, 4096): (_by_rows(16, 512, 8), _deep(2), _deep(2, 4, 256), None),
    ("feed_forward_input", 24576, 4096): (
        _by_rows(32, 256), WideTile(64, 128), None, WideTile(64, 64, calls_late=True),
    ),
    ("add_linear", 4096, 12288): (_deep(2), _deep(2), _deep(2, 4, 256), _deep(2, 5)),
    # Qwen3-4B:
    ("attend_input", 6144, 2560): (_by_rows(16, 512, 8), WideTile(64, 128, 2), _deep(1, 4, 256), _deep(1, 5)),
    ("add_linear", 2560, 4096): (_by_rows(8, 1024), _deep(3), _deep(3, 4, 256, calls_late=True), _deep(3, 5)),
    ("feed_forward_input", 19456, 2560): (
        _by_rows(16, 512), WideTile(128, 128, stages=5), WideTile(128, 64, stages=5, calls_late=True),
        WideTile(64, 64, calls_late=True),
    ),
    ("add_linear", 2560, 9728): (_deep(3), _deep(3), _deep(3), _deep(3, 5, calls_late=True)),
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
