"""What a round needs to know of its sequences, gathered from the state of all (slow twin)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Seats:
    """The sequences of a round.

    Attributes:
        block_table: int64 ``[batch, pages]``.
        committed: int64 ``[batch]``, tokens whose keys and values are in the target's cache.
        roots: int64 ``[batch]``, the token at position ``committed``.
        prompt_tokens: int64 ``[batch]``.
        injected: int64 ``[batch]``, tokens whose context is in the drafter's cache; all where nobody drafts.
        pending: int64 ``[batch]``, committed tokens whose taps wait to be injected.
        room: int64 ``[batch]``, how deep a tree may go, so that its path and the bonus token end within the context.
        sharpness: float32 ``[batch]``, what the drafter's logits are multiplied by; see
            `ddtree.kernels.top_log_probs.top_log_probs`.
    """

    block_table: torch.Tensor
    committed: torch.Tensor
    roots: torch.Tensor
    prompt_tokens: torch.Tensor
    injected: torch.Tensor
    pending: torch.Tensor
    room: torch.Tensor
    sharpness: torch.Tensor


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
    """Gather the rows ``slots`` of what is known of all sequences.

    The last slot belongs to no sequence and fills up batches: it is emptied, so that it never outgrows its block table.

    Args:
        slots: int64 ``[batch]``.
        block_table: int64 ``[all, pages]``.
        committed, roots, prompt_tokens, pending: int64 ``[all]``, as in `Seats`.
        sharpness: float32 ``[all]``.
        max_model_len: a sequence has at most so many tokens.
    """
    committed[-1:].zero_()
    pending[-1:].zero_()
    taken, waiting = committed[slots], pending[slots]
    return Seats(
        block_table=block_table[slots],
        committed=taken,
        roots=roots[slots],
        prompt_tokens=prompt_tokens[slots],
        injected=taken - waiting,
        pending=waiting,
        room=(max_model_len - 2 - taken).clamp_min(0),
        sharpness=sharpness[slots],
    )
