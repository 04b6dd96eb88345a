"""Rows of an embedding table (slow twin)."""

import torch
from torch.nn.functional import embedding, pad


def embed_rows(table: torch.Tensor, tokens: torch.Tensor, rows: int | None = None, filler: int = 0) -> torch.Tensor:
    """The embeddings of ``tokens``, filled up to ``rows`` rows with that of the token ``filler``.

    Args:
        table: ``[vocab, hidden]``.
        tokens: int64 ``[batch, n]``, n at most ``rows``.

    Returns:
        ``[batch, rows, hidden]``, the caller's own to overwrite.
    """
    missing = 0 if rows is None else rows - tokens.shape[1]
    return embedding(pad(tokens, (0, missing), value=filler) if missing else tokens, table)
