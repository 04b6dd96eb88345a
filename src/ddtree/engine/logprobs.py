"""Log-probabilities of generated tokens, taken on the device and read with the tokens."""

import struct
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ddtree.kernels.kernel_set import KernelSet

MAX_LOGPROBS = 20
"""Alternatives of a token that can be asked for; all are told as soon as one request asks for any."""


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was to the target, before penalties, bias, temperature and filters.

    Attributes:
        top: the likeliest tokens with their log-probabilities, best first; equals by lower id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def tell_logprobs(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, kernels: KernelSet) -> torch.Tensor:
    """Log-probabilities of a round's tokens, for the host.

    Args:
        logits: ``[batch, rows, vocab]`` after each verified row.
        rows: int64 ``[batch, n]``, after which row each token was chosen.
        tokens: int64 ``[batch, n]``.

    Returns:
        int64 ``[batch, n * (1 + 2k)]``: per token its own log-probability, then k token ids, then k log-probabilities;
        log-probabilities as the bits of float32.
    """
    seen = logits.gather(1, rows[..., None].expand(-1, -1, logits.shape[-1]))
    wide = seen.float()
    own = wide.gather(2, tokens[..., None]) - wide.logsumexp(-1, keepdim=True)
    top, ids = kernels.top_log_probs(seen, min(MAX_LOGPROBS, logits.shape[-1]))
    return torch.cat((_bits(own), ids, _bits(top)), dim=2).flatten(1)


def read_logprobs(numbers: Seq[int], tokens: Seq[int], wanted: int, vocab_size: int) -> Iterator[TokenLogprob]:
    """One sequence's part of `tell_logprobs`, for its first ``tokens``, with ``wanted`` alternatives each."""
    k = min(MAX_LOGPROBS, vocab_size)
    for at, token in enumerate(tokens):
        told = numbers[at * (1 + 2 * k) :][: 1 + 2 * k]
        top = zip(told[1 : 1 + wanted], map(_float, told[1 + k : 1 + k + wanted]), strict=False)
        yield TokenLogprob(token, min(_float(told[0]), 0.0), tuple(top))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32).long()


def _float(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    return value
