"""How the products of a large model's layer are cut into programs."""

from dataclasses import dataclass

_ROW_BUCKETS = (1, 16, 32, 64, 128)
"""Row counts are rounded up to one of these; more rows go to cuBLAS."""
MAX_ROWS = _ROW_BUCKETS[-1]


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
        library: cuBLAS multiplies, between our small kernels; nothing else of the tile counts.
        early: kernels start while the one before still runs.
        calls_late: the kernel behind may start when the products are made, instead of at once.
    """

    columns: int = 0
    depth: int = 0
    splits: int = 1
    stages: int = 4
    warps: int = 4
    by_rows: bool = False
    library: bool = False
    early: bool = True
    calls_late: bool = False

    def fits(self, rows: int, columns: int, size: int, gated: bool) -> bool:
        """Whether the product can be cut so; ``columns`` are all weight rows, ``size`` is the inner axis."""
        if self.library:
            return rows <= MAX_ROWS
        own = self.columns // 2 if gated else self.columns
        steps = size // self.depth
        even = columns % self.columns == 0 and size % self.depth == 0 and own >= 8
        if self.by_rows:
            return even and rows == 1 and self.splits == 1
        # The last stretch may be shorter, but not empty.
        return even and rows <= MAX_ROWS and (self.splits - 1) * -(-steps // self.splits) < steps


_LIBRARY = WideTile(library=True)


def _deep(splits: int, stages: int = 8, depth: int = 128) -> WideTile:
    """About one program a multiprocessor, which has all its shared memory for steps on their way."""
    return WideTile(64, depth, splits, stages)


_MEASURED: dict[tuple[str, int, int], tuple[WideTile | None, ...]] = {
    # One H200, `benchmarks/wide_h200.py`: the tile for each bucket, None where cuBLAS and today's kernels are as fast.
    # Qwen3-8B:
    ("attend_input", 6144, 4096): (
        WideTile(16, 512, warps=8, by_rows=True), _deep(1), WideTile(64, 128, 2), _deep(1, 5), _LIBRARY,
    ),
    ("add_linear", 4096, 4096): (None, _deep(2), _deep(2), None, _deep(2, 7, 64)),
    ("feed_forward_input", 24576, 4096): (
        WideTile(16, 512, by_rows=True), WideTile(64, 128), _LIBRARY, WideTile(64, 64),
        WideTile(256, 64, warps=8),
    ),
    ("add_linear", 4096, 12288): (_deep(2), _deep(2), _deep(2), _deep(2, 5), _deep(2, 7, 64)),
    # Qwen3-4B:
    ("attend_input", 6144, 2560): (
        WideTile(16, 512, warps=8, by_rows=True), WideTile(64, 128, 2), _deep(1), _deep(1, 5), None,
    ),
    ("add_linear", 2560, 4096): (_deep(3), _deep(3), _deep(3), _deep(3, 5), _deep(3, 7, 64)),
    ("feed_forward_input", 19456, 2560): (
        WideTile(16, 512, by_rows=True), WideTile(64, 128), WideTile(64, 128), WideTile(64, 64), None,
    ),
    ("add_linear", 2560, 9728): (_deep(3), _deep(3), _deep(3), _deep(3, 5), _deep(3, 7, 64)),
}  # fmt: skip


def wide_tile(kind: str, rows: int, columns: int, size: int) -> WideTile | None:
    """The tile that was measured to be faster than cuBLAS; None where there is none.

    Args:
        kind: the kernel's name in `ddtree.kernels.layer_products`.
        rows, columns, size: of the product.
    """
    if rows > MAX_ROWS or (measured := _MEASURED.get((kind, columns, size))) is None:
        return None
    return measured[next(i for i, most in enumerate(_ROW_BUCKETS) if rows <= most)]


def streamed_rows(kind: str, columns: int, size: int) -> list[int]:
    """Row counts, each the largest of its bucket, at which the product has a tile; arguments as of `wide_tile`."""
    return [rows for rows in _ROW_BUCKETS if wide_tile(kind, rows, columns, size) is not None]
