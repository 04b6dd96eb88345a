"""Cross-entropy and divergence of rows of logits, and their gradient in place of the logits (slow twins).

For training drafters: a row has tens of thousands of logits, so that each pass over them counts.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Distributions:
    """Next-token distributions to come close to.

    Attributes:
        logits: ``[m, vocab]``.
        least: float32 ``[m]``, tokens with smaller logits do not count.
        log_sums: float32 ``[m]``, logarithm of the sum of exponentials of those that count.
    """

    logits: torch.Tensor
    least: torch.Tensor
    log_sums: torch.Tensor


def row_statistics(
    logits: torch.Tensor, labels: torch.Tensor, least: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the loss needs to know of each row before there is a gradient.

    Args:
        logits: ``[n, vocab]``.
        labels: int64 ``[n]``.
        least: float32 ``[n]``, smaller logits do not count for the sum; minus infinity lets all count.

    Returns:
        logarithm of the sum of exponentials and logit of the label, float32 ``[n]``; the largest logit's token, int64
        ``[n]``, the lowest among equals.
    """
    wide = logits.float()
    counted = wide.masked_fill(wide < least[:, None], -torch.inf)
    return counted.logsumexp(dim=1), wide.gather(1, labels[:, None])[:, 0], wide.argmax(dim=1)


def replace_by_gradient(
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    token_share: float,
    wanted: Distributions | None,
    wanted_row: torch.Tensor,
) -> torch.Tensor:
    """Put the gradient of ``weight * (token_share * cross-entropy + (1 - token_share) * divergence)`` over the logits.

    Args:
        logits: ``[n, vocab]``, overwritten; rows of weight 0 become zeros.
        log_sums: float32 ``[n]``, from `row_statistics`.
        labels, wanted_row: int64 ``[n]``; the second is each row's place in ``wanted``.
        weights: float32 ``[n]``.
        wanted: None where ``token_share`` is 1.

    Returns:
        divergence float32 ``[n]``: Kullback-Leibler, of the row from what is wanted; zeros where nothing is.
    """
    wide = logits.float()
    gradient = (wide - log_sums[:, None]).exp()
    divergence = torch.zeros_like(log_sums)
    if wanted is not None:
        other = wanted.logits[wanted_row].float()
        log_p = other - wanted.log_sums[wanted_row, None]
        p = log_p.exp().masked_fill(other < wanted.least[wanted_row, None], 0.0)
        divergence = (p * (log_p - wide + log_sums[:, None])).sum(dim=1)
        gradient -= (1 - token_share) * p
    gradient.scatter_add_(1, labels[:, None], gradient.new_full((len(labels), 1), -token_share))
    logits.copy_(gradient * weights[:, None])
    return divergence
