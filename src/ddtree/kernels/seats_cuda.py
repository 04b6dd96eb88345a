"""The sequences of a round, gathered in one launch."""

import torch

from ddtree.kernels.cuda_module import cuda_module
from ddtree.kernels.seats import Seats


def take_seats(
    slots: torch.Tensor,
    block_table: torch.Tensor,
    committed: torch.Tensor,
    roots: torch.Tensor,
    prompt_tokens: torch.Tensor,
    pending: torch.Tensor,
    sharpness: torch.Tensor,
    max_model_len: int,
) -> Seats:
    """See `ddtree.kernels.seats.take_seats`."""
    batch, pages = len(slots), block_table.shape[1]
    table = torch.empty(batch, pages, dtype=torch.int64, device=slots.device)
    numbers = torch.empty(6, batch, dtype=torch.int64, device=slots.device)
    own_sharpness = torch.empty(batch, device=slots.device)
    cuda_module("round_books.cu", slots.device).launch(
        "take_seats", (batch, 1, 1), min(-(-max(pages, 6) // 32) * 32, 1024), 0,
        slots.contiguous(), block_table, committed, roots, prompt_tokens, pending, sharpness, table,
        numbers, own_sharpness, batch, pages, committed.shape[0] - 1, max_model_len,
    )  # fmt: skip
    return Seats(table, *(*numbers.unbind(0), own_sharpness))
