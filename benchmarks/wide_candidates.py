"""Tiles that are worth a try for the products of large models' layers."""

from dataclasses import replace

from ddtree.kernels.product_tiling import Chip
from ddtree.kernels.wide_tiling import WideTile

# (columns, depth, stages, warps, programs wanted at a time) by rows of the tile.
TILES = {
    16: (
        (64, 128, 8, 4, 132), (64, 128, 10, 4, 132), (64, 128, 4, 4, 264), (64, 128, 5, 4, 264), (64, 64, 6, 4, 396),
        (128, 128, 5, 4, 132), (64, 256, 5, 4, 132),
    ),
    32: (
        (64, 128, 8, 4, 132), (64, 128, 4, 4, 264), (64, 128, 3, 4, 396), (64, 64, 6, 4, 396), (128, 64, 5, 4, 264),
        (64, 256, 4, 4, 132),
    ),
    64: (
        (64, 128, 5, 4, 132), (64, 128, 6, 4, 132), (32, 128, 4, 4, 264), (64, 64, 4, 4, 396), (128, 64, 4, 4, 264),
        (256, 64, 5, 8, 132), (64, 64, 8, 4, 132),
    ),
    80: (
        (64, 128, 6, 4, 132), (64, 128, 3, 4, 264), (64, 64, 6, 4, 264), (64, 64, 12, 4, 132), (64, 64, 4, 4, 396),
        (128, 64, 4, 4, 264), (128, 64, 8, 4, 132), (128, 128, 4, 4, 132), (256, 64, 5, 8, 132),
    ),
    96: (
        (64, 128, 5, 4, 132), (64, 64, 5, 4, 264), (64, 64, 11, 4, 132), (128, 64, 3, 4, 264), (128, 64, 7, 4, 132),
        (128, 128, 3, 4, 132), (256, 64, 5, 8, 132),
    ),
    128: (
        (64, 128, 4, 4, 132), (64, 64, 4, 4, 264), (64, 64, 9, 4, 132), (128, 64, 3, 4, 264), (128, 64, 6, 4, 132),
        (128, 128, 3, 4, 132), (256, 64, 4, 8, 132),
    ),
}  # fmt: skip
BY_ROWS = ((16, 512, 8), (16, 512, 4), (8, 1024, 4), (16, 1024, 8), (32, 256, 4))


def wgmma_tiles(rows: int, columns: int, size: int, gated: bool, most: int = 8) -> list[WideTile]:
    """Tiles whose programs run all at once, one to three a multiprocessor, which they fill as well as they can."""

    def with_stages(tile: WideTile, blocks: int) -> WideTile:
        """As many as ``blocks`` programs a multiprocessor leave shared memory for; 1 KB of each is the system's."""
        steps = -(-size // tile.depth // tile.splits)
        room = (Chip().shared_bytes + 1024) // blocks - 1024
        stages = [n for n in range(2, 17) if replace(tile, stages=n).shared_bytes(rows) <= room]
        return replace(tile, stages=min([stages[-1], max(steps, 2)]) if stages else 99)

    found = []
    for n in (256, 192, 128, 64):
        for blocks in (1, 2, 3) if n == 64 else (1, 2):
            programs = columns // n
            splits = min(Chip().processors * blocks // programs, 8)
            if columns % n or splits < 1:
                continue
            tile = with_stages(WideTile(n, 64, splits, by="wgmma", joined=splits > 1), blocks)
            used = programs * splits / (Chip().processors * blocks)
            if used > 0.55 and tile.stages >= 3 and tile.fits(rows, columns, size, gated):
                found.append((used - 0.02 * splits - 0.05 * blocks, blocks, tile))
    found.sort(key=lambda one: -one[0])
    tiles = [tile for _, _, tile in found]
    for _, blocks, tile in found[:1]:
        deep = [with_stages(replace(tile, depth=depth), blocks) for depth in (128, 256)]
        variants = [replace(tile, joined=False)] if tile.joined else []
        variants += [one for one in deep if one.stages >= 3]
        tiles = tiles[: most - len(variants)] + variants
    tiles = [tile for tile in tiles if tile.fits(rows, columns, size, gated)]
    return list(dict.fromkeys(tiles))


def tile_rows(rows: int) -> int:
    return next(most for most in TILES if rows <= most)


def candidates(kind: str, rows: int, columns: int, size: int, by: str) -> list[WideTile]:
    gated = kind == "feed_forward_input"
    if by == "both":
        return candidates(kind, rows, columns, size, "triton") + wgmma_tiles(rows, columns, size, gated, most=4)
    if by == "wgmma":
        return wgmma_tiles(rows, columns, size, gated)
    found = []
    if rows == 1:
        found = [WideTile(n, k, warps=warps, by="rows") for n, k, warps in BY_ROWS]
    for n, k, stages, warps, wanted in TILES[tile_rows(rows)]:
        found.append(WideTile(n, k, max(1, min(wanted // (columns // n), 8)), stages, warps))
    return list(dict.fromkeys(tile for tile in found if tile.fits(rows, columns, size, gated)))


def brief(tile: WideTile | None) -> str:
    if tile is None:
        return "cuBLAS"
    by = "rows" if tile.by == "rows" else f"s{tile.stages}x{tile.splits}"
    calls = "" if tile.early and not tile.calls_late else " calls late" if tile.early else " waits"
    if tile.by == "wgmma":
        return f"wgmma {tile.columns}x{tile.depth} {by}{' joined' * tile.joined}{calls}"
    return f"{tile.columns}x{tile.depth} w{tile.warps} {by}{calls}"
