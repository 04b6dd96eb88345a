"""Rotation angles of packed tokens."""

from __future__ import annotations

import torch

from ddtree.models.rope import RotaryEmbedding


def rotation(
    rope: RotaryEmbedding, positions: torch.Tensor, prompt_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each float32 ``[rows, tokens, head_dim / 2]``.

    Args:
        positions: int64 ``[rows, tokens]``, in each token's own conversation.
        prompt_tokens: int64 ``[rows, tokens]``, length of that conversation's prompt, which some kinds of rope read.
    """
    frequencies = rope.frequencies(lambda: positions.reshape(-1, 1), prompt_tokens.reshape(-1))
    if frequencies.dim() == 3:
        frequencies = frequencies.view(*positions.shape, -1)
    angles = positions[..., None].float() * frequencies
    return angles.cos() * rope.scale, angles.sin() * rope.scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head.

    Args:
        x: ``[rows, heads, tokens, head_dim]``.
        cos, sin: from `rotation`.
    """
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`ddtree.kernels.norm.rms_norm` in plain operations, which torch.compile joins with their neighbours."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)
