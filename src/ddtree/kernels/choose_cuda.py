"""The target's choice after each row: one pass over the logits, noise drawn on the way.

Bias, filters and penalties are the twin's."""

from collections.abc import Callable

import torch

from ddtree.kernels import choose as twin
from ddtree.kernels.arrivals import arrival_counters
from ddtree.kernels.choose import SamplingTensors
from ddtree.kernels.cuda_module import cuda_module
from ddtree.kernels.tree_tensors import TreeTensors

_THREADS = 256
_BLOCKS = 528  # to aim at: four for each multiprocessor of an H100 or H200


def choose(
    logits: torch.Tensor,
    sampling: SamplingTensors | None,
    tree: TreeTensors,
    committed: torch.Tensor,
    allowed: torch.Tensor | None = None,
    running_sum: Callable[[torch.Tensor], torch.Tensor] = twin.running_sum,
) -> torch.Tensor:
    """See `ddtree.kernels.choose.choose`; bfloat16 logits stay so where there is neither bias, penalty nor filter."""
    if sampling is not None and (sampling.logit_bias is not None or sampling.output_counts is not None):
        logits = twin.adjust(logits.float(), sampling, tree)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    filtered = sampling is not None and sampling.any_sampled and sampling.any_filtered
    if sampling is not None and filtered:
        temperature = sampling.temperature[:, None, None]
        logits = twin._filter(logits.float() / torch.where(temperature > 0, temperature, 1.0), sampling, running_sum)
    batch, rows, vocab = logits.shape
    if logits.dtype != torch.bfloat16:
        logits = logits.float()
    logits = logits.contiguous()
    device = logits.device
    least = _THREADS * 8  # tokens a block, so that it has something to do
    chunks = max(1, min(-(-_BLOCKS // (batch * rows)), -(-vocab // least)))
    per_block = -(-vocab // chunks)
    chosen = torch.empty(batch, rows, dtype=torch.int64, device=device)
    partial = torch.empty(batch * rows * chunks, dtype=torch.int64, device=device)
    arrived = arrival_counters("choose", batch * rows, device)
    samples = sampling is not None and sampling.any_sampled
    temperatures, seed_keys = (sampling.temperature, sampling.seed_keys) if sampling is not None else (None, None)
    module = cuda_module("choose.cu", device, LOGIT_BF16=int(logits.dtype == torch.bfloat16), SAMPLED=int(samples))
    module.launch(
        "choose", (chunks, batch * rows, 1), _THREADS, 0,
        logits, temperatures, seed_keys, committed.contiguous(), tree.depths.contiguous(),
        chosen, partial, arrived, vocab, rows, per_block, int(filtered),
    )  # fmt: skip
    return chosen
