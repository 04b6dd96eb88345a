"""The target's choice after each row: argmax, or a sample after penalties and filters (slow twin)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ddtree.kernels.noise import gumbel_noise
from ddtree.kernels.tree_tensors import TreeTensors


@dataclass(frozen=True)
class SamplingTensors:
    """How each sequence of a batch samples; the flags are known to the host and pick what is computed at all.

    Attributes:
        temperature: float32 ``[batch]``; 0 means argmax.
        top_k: int64 ``[batch]``; 0 means all tokens.
        top_p, min_p: float32 ``[batch]``; 1 and 0 mean all tokens.
        repetition, presence, frequency: float32 ``[batch]`` penalties; 1, 0 and 0 mean none.
        seed_keys: int32 ``[batch]`` from `ddtree.kernels.noise.seed_key`.
        output_counts: int32 ``[batch, vocab]``, how often each token was generated, the root included; None unless some
            sequence has a penalty.
        in_prompt: bool ``[batch, vocab]``, tokens of the prompt; None unless some sequence has a penalty.
        any_sampled, any_filtered: whether some sequence samples, and does so with top-k, top-p or min-p.
        logit_bias: float32 ``[batch, vocab]``, added to the logits; None unless some sequence has one.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    seed_keys: torch.Tensor
    output_counts: torch.Tensor | None
    in_prompt: torch.Tensor | None
    any_sampled: bool
    any_filtered: bool
    logit_bias: torch.Tensor | None = None


def choose(
    logits: torch.Tensor,
    sampling: SamplingTensors | None,
    tree: TreeTensors,
    committed: torch.Tensor,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The token that follows each row, exactly as plain decoding would choose it there.

    Penalties count the tokens of a row's own path; noise depends on the seed, the position and the token alone. Walking
    by these samples is exact: each is a draw from the target's distribution given that row's own prefix.

    Args:
        logits: ``[batch, rows, vocab]`` after each row; the work is done in float32.
        sampling: None where all sequences take the plain argmax.
        tree: the verified trees.
        committed: int64 ``[batch]``, position of the roots.
        allowed: bool ``[batch, rows, vocab]``, the tokens to choose from, of which each row has some; None for all.

    Returns:
        int64 ``[batch, rows]``. Equal scores go to the lower token id.
    """
    if sampling is None:
        return (logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)).argmax(-1)
    logits = adjust(logits.float(), sampling, tree)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    greedy = logits.argmax(-1)
    if not sampling.any_sampled:
        return greedy
    temperature = sampling.temperature[:, None, None]
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)
    if sampling.any_filtered:
        scaled = _filter(scaled, sampling)
    scaled = scaled + gumbel_noise(sampling.seed_keys, committed[:, None] + tree.depths + 1, logits.shape[-1])
    return torch.where(temperature[..., 0] > 0, scaled.argmax(-1), greedy)


def adjust(logits: torch.Tensor, sampling: SamplingTensors, tree: TreeTensors) -> torch.Tensor:
    """Float32 logits after bias and penalties."""
    if sampling.logit_bias is not None:
        logits = logits + sampling.logit_bias[:, None]
    if sampling.output_counts is not None and sampling.in_prompt is not None:
        logits = _penalise(logits, sampling, tree)
    return logits


def running_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums up to and including each number of the last axis."""
    return x.cumsum(-1)


def _penalise(logits: torch.Tensor, sampling: SamplingTensors, tree: TreeTensors) -> torch.Tensor:
    assert sampling.output_counts is not None and sampling.in_prompt is not None
    on_path = tree.ancestors.int()
    on_path[..., 0] = 0  # the root is among the generated tokens already
    tokens = tree.tokens[:, None].expand_as(tree.ancestors)
    counts = sampling.output_counts[:, None].expand(logits.shape).contiguous().scatter_add_(2, tokens, on_path)
    generated = counts > 0
    repetition = sampling.repetition[:, None, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(generated | sampling.in_prompt[:, None], repeated, logits)
    logits = logits - sampling.frequency[:, None, None] * counts
    return logits - sampling.presence[:, None, None] * generated


def _filter(
    scaled: torch.Tensor,
    sampling: SamplingTensors,
    running_sum: Callable[[torch.Tensor], torch.Tensor] = running_sum,
) -> torch.Tensor:
    """Top-k, then top-p, then min-p; dropped tokens get -inf. The best token always stays."""
    values, ids = scaled.sort(dim=-1, descending=True, stable=True)  # stable: equal values keep the lower id first
    rank = torch.arange(values.shape[-1], device=values.device)
    top_k = sampling.top_k[:, None, None]
    kept = (rank < top_k) | (top_k == 0)
    probs = values.masked_fill(~kept, -torch.inf).softmax(-1)
    before = running_sum(probs) - probs
    top_p = sampling.top_p[:, None, None]
    # A sequence without this filter keeps all, even where the sum of probabilities is rounded up to 1.
    kept = kept & ((before < top_p) | (top_p >= 1) | (rank == 0))
    kept = kept & ((probs >= sampling.min_p[:, None, None] * probs[..., :1]) | (rank == 0))
    return torch.full_like(scaled, -torch.inf).scatter_(-1, ids, values.masked_fill(~kept, -torch.inf))
