"""Tiles of flex attention cover all that is visible, and flex attention says what plain attention says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from ddtree.errors import UserError
from ddtree.train.block_mask import TILE, DraftMask, TargetMask, attend

ROWS, ROW_TOKENS = 2, 512
CPU = torch.device("cpu")
LENGTHS = ([130, 7, 200, 90], [512])


def starts() -> torch.Tensor:
    starts = torch.arange(ROW_TOKENS).repeat(ROWS, 1)
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            starts[row, at : at + length] = at
            at += length
    return starts


def roots(count: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(count)
    return torch.stack([torch.randperm(ROW_TOKENS, generator=draw)[:count].sort().values for _ in range(ROWS)])


def agree(tiled: Any, dense: Any) -> None:
    """The tiles cover what is visible, skip something, and give the same attention."""
    assert isinstance(tiled, BlockMask) and isinstance(dense, torch.Tensor)
    visited = tiled.to_dense().bool().repeat_interleave(TILE, 2).repeat_interleave(TILE, 3)
    assert not (dense & ~visited).any()
    assert not visited.all()
    queries, keys = dense.shape[2:]
    draw = torch.Generator().manual_seed(5)
    q = torch.randn(ROWS, 4, queries, 16, generator=draw)
    k, v = (torch.randn(ROWS, 2, keys, 16, generator=draw) for _ in range(2))
    torch.testing.assert_close(attend(q, k, v, tiled), attend(q, k, v, dense), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_target(window: int | None) -> None:
    tiled = TargetMask(ROWS, ROW_TOKENS, (window,), CPU, tiled=True).masks(starts())[window]
    agree(tiled, TargetMask(ROWS, ROW_TOKENS, (window,), CPU).masks(starts())[window])


@pytest.mark.parametrize("block", [4, 10, 16])
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"is_causal": True},
        {"windows": (9,)},
        {"windows": (9,), "sliding_is_causal": True},
        {"draft_window": 30},
    ],
    ids=["whole", "causal", "window", "causal window", "draft window"],
)
def test_drafter(block: int, kind: dict[str, Any]) -> None:
    settings = {"windows": (None,), "is_causal": False, "sliding_is_causal": False, "draft_window": None, **kind}
    count, window = 64, settings["windows"][0]
    at = roots(count)
    first = starts().gather(1, at)
    tiled = DraftMask(ROWS, ROW_TOKENS, count, block, **settings, device=CPU, tiled=True).masks(at, first)[window]
    agree(tiled, DraftMask(ROWS, ROW_TOKENS, count, block, **settings, device=CPU).masks(at, first)[window])


def test_sizes_that_make_no_whole_tiles_are_refused_where_there_are_tiles() -> None:
    with pytest.raises(UserError, match="rows of 100 tokens are no multiple of 128"):
        TargetMask(ROWS, 100, (None,), CPU, tiled=True)
    with pytest.raises(UserError, match="5 anchors a row with blocks of 16 are no multiple of 128"):
        DraftMask(
            ROWS, ROW_TOKENS, 5, 16, (None,), is_causal=False, sliding_is_causal=False, draft_window=None, device=CPU,
            tiled=True,
        )  # fmt: skip
