"""The target's choice after each row under SGLang's sampling parameters, equal in law to its own sampler."""

from typing import Any

import torch

from ddtree.kernels.choose import SamplingTensors
from ddtree.kernels.noise import seed_key
from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.sglang.kernel_choice import WorkerKernels


def choose_tokens(
    logits: torch.Tensor,
    info: Any,
    tree: TreeTensors,
    committed: torch.Tensor,
    round_seed: int,
    kernels: WorkerKernels,
    sequential_filters: bool = False,
) -> torch.Tensor:
    """The token that follows each row.

    Args:
        logits: ``[batch, rows, vocab]`` of the target.
        info: SGLang's ``SamplingBatchInfo``, or None for argmax. Penalties and custom processors never get here: such
            requests are refused.
        tree: the verified trees.
        committed: int64 ``[batch]``, position of the roots.
        round_seed: another one each round, the same on all ranks.
        kernels: what to compute with.
        sequential_filters: top-k, then top-p of what is left, as FlashInfer does beside min-p; else both look at the
            whole distribution, as SGLang does everywhere else.

    Returns:
        int64 ``[batch, rows]``.
    """
    if info is not None and info.logit_bias is not None:
        logits = logits + info.logit_bias[:, None]
    if info is None or info.is_all_greedy:
        chosen: torch.Tensor = kernels.choose(logits, None, tree, committed)
        return chosen
    batch = len(logits)
    temperature = request_temperatures(info)
    greedy = temperature == 0
    allowed = None
    if info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling:
        scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None, None]
        allowed = allowed_tokens(
            scaled.softmax(-1), info.top_ks, info.top_ps, info.min_ps, sequential=sequential_filters
        )
    keys = torch.arange(batch, dtype=torch.int32, device=logits.device) * 0x3C6EF372 + seed_key(round_seed)
    zeros, ones = torch.zeros_like(temperature), torch.ones_like(temperature)
    sampling = SamplingTensors(
        temperature=temperature, top_k=torch.zeros_like(info.top_ks).long(), top_p=ones, min_p=zeros,
        repetition=ones, presence=zeros, frequency=zeros, seed_keys=keys, output_counts=None, in_prompt=None,
        any_sampled=True, any_filtered=False,
    )  # fmt: skip
    chosen = kernels.choose(logits, sampling, tree, committed, allowed)
    return chosen


def request_temperatures(info: Any) -> torch.Tensor:
    """float32 ``[batch]``, 0 for greedy requests, which SGLang gives the temperature 1 and one token to choose from."""
    return torch.where(info.top_ks <= 1, 0.0, info.temperatures.view(-1).float())


def allowed_tokens(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor, sequential: bool
) -> torch.Tensor:
    """Which tokens the filters leave.

    Args:
        probs: float32 ``[batch, rows, vocab]``.
        top_ks: int32 ``[batch]``; top_ps, min_ps: float32 ``[batch]``.
        sequential: see `choose_tokens`.

    Returns:
        bool, shaped as ``probs``; the most likely token always stays.
    """
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.arange(values.shape[-1], device=probs.device) < top_ks.view(-1, 1, 1).clamp_min(1)
    if sequential:
        values = torch.where(kept, values, 0.0)
        values = values / values.sum(-1, keepdim=True)
    kept = kept & (values.cumsum(-1) - values <= top_ps.view(-1, 1, 1))
    kept = kept & (values >= values[..., :1] * min_ps.view(-1, 1, 1))
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter_(-1, ids, kept)
