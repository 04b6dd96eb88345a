"""Rows of an embedding table, copied in pieces of 16 bytes."""

import torch

from ddtree.kernels import embedding as twin
from ddtree.kernels.cuda_module import cuda_module


def embed_rows(table: torch.Tensor, tokens: torch.Tensor, rows: int | None = None, filler: int = 0) -> torch.Tensor:
    """See `ddtree.kernels.embedding.embed_rows`."""
    batch, given = tokens.shape
    rows, hidden = rows or given, table.shape[1]
    pieces, odd = divmod(hidden * table.element_size(), 16)
    if odd:
        return twin.embed_rows(table, tokens, rows, filler)
    out = table.new_empty(batch, rows, hidden)
    cuda_module("round_books.cu", table.device).launch(
        "embed_rows", (rows, batch, 1), min(-(-pieces // 32) * 32, 256), 0,
        table, tokens.contiguous(), out, rows, given, filler, pieces,
    )  # fmt: skip
    return out
