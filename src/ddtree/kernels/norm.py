"""Root mean square normalisation (slow twin)."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis in float32, round to the type of ``x``, then scale, in the order Hugging Face has.

    Args:
        x: ``[..., size]``.
        weight: ``[size]``.
    """
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    return weight * torch.nn.functional.rms_norm(wide, weight.shape, None, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``x`` to the residual stream and normalise the sum.

    Args:
        x, residual: ``[..., size]``.

    Returns:
        the normalised sum and the sum itself, the new residual stream.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total
