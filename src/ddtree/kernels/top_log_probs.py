"""The k most likely tokens of each depth, with ties settled by token id (slow twin)."""

import torch


def top_log_probs(
    logits: torch.Tensor, k: int, sharpness: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Natural log-probabilities of the ``k`` best tokens, best first; equal logits go to the lower token id.

    Args:
        logits: ``[batch, depths, vocab]``, any float type; probabilities are computed in float32.
        k: at most ``vocab``.
        sharpness: float32 ``[batch]`` above 0, by which the logits are multiplied: a temperature's reciprocal. It
            changes probabilities, never the order. None for 1.

    Returns:
        log-probabilities float32 ``[batch, depths, k]`` and token ids int64 ``[batch, depths, k]``.
    """
    logits = logits.float()
    values, ids = logits.topk(k, dim=-1)
    # topk leaves open which of several equal logits it takes. Inside the k a stable sort by id, then by value settles
    # it; where equals were left outside, whole keys of (logit, id) are compared instead, for those rows only.
    boundary = values[..., -1:]
    torn = (logits == boundary).sum(-1) != (values == boundary).sum(-1)
    if logits.device.type == "cpu":
        if torn.any():
            rows = torn.nonzero(as_tuple=True)
            ids[rows] = _ordered_keys(logits[rows]).topk(k, dim=-1).indices
    else:
        ids = torch.where(torn[..., None], _ordered_keys(logits).topk(k, dim=-1).indices, ids)
    ids = ids.sort(dim=-1).values
    values = logits.gather(-1, ids)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    ids, values = ids.gather(-1, order), values.gather(-1, order)
    if sharpness is not None:
        values, logits = values * sharpness[:, None, None], logits * sharpness[:, None, None]
    # Rounding may put a logit above the logsumexp when one token holds all the probability.
    return (values - logits.logsumexp(-1, keepdim=True)).clamp_max(0.0), ids


def _ordered_keys(logits: torch.Tensor) -> torch.Tensor:
    """int64 keys that order by logit, then by lower token id."""
    bits = logits.contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return ordered * 2**32 + (2**32 - 1 - ids)
