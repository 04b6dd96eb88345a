"""Sampling noise as a function of (seed, position, token) and of nothing else.

Gumbel-max: adding independent Gumbel noise to logits and taking the argmax samples from their softmax. Since the noise
of a token at a position does not depend on how the position was reached, a tree, a chain and plain decoding that see
the same logits draw the same token. The bits come from a 32-bit avalanche mix (two rounds keyed by the position, the
multipliers of C. Wellons' "lowbias32"), cheap enough for a whole vocabulary at every node.
"""

import hashlib

import torch

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
POSITION_STRIDE = 0x9E3779B9
SECOND_KEY = 0x6A09E667


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Avalanche of int32 bits; multiplication wraps, shifts are logical."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * _signed(MULTIPLIERS[0])
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * _signed(MULTIPLIERS[1])
    return bits ^ ((bits >> 16) & 0xFFFF)


def seed_key(seed: int) -> int:
    """A request's seed, 0 .. 2**64 - 1, as the signed 32-bit key that its noise is drawn with."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def gumbel_noise(seed_keys: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gumbel(0, 1) noise for every token of the vocabulary.

    Args:
        seed_keys: int32 ``[batch]`` from `seed_key`.
        positions: int64 ``[batch, rows]``, position at which the drawn token will stand.
        vocab_size: tokens.

    Returns:
        float32 ``[batch, rows, vocab_size]``.
    """
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=positions.device)
    row_key = _mix(positions.int() * _signed(POSITION_STRIDE) + seed_keys[:, None])
    second_key = _mix(row_key ^ _signed(SECOND_KEY))
    bits = _mix(_mix(tokens * _signed(POSITION_STRIDE) + row_key[..., None]) ^ second_key[..., None])
    # Uniform in (0, 1) with its fine end at 0, where the exponential variate is small and the winners are decided.
    uniform = (bits.double().add_(2.0**31 + 0.5).mul_(2.0**-32)).float().clamp_max_(1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
