"""The k most likely tokens of each depth, selected chunk by chunk; the last block of a row merges the chunks."""

import torch

from ddtree.kernels import top_log_probs as twin
from ddtree.kernels.arrivals import arrival_counters
from ddtree.kernels.cuda_module import cuda_module

MAX_K, MAX_VOCAB = 128, 32 * 256 * 32
_THREADS, _MAX_CHUNKS = 256, 32  # as in the source


def top_log_probs(
    logits: torch.Tensor, k: int, sharpness: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ddtree.kernels.top_log_probs.top_log_probs`, which serves ``k`` above 128 and vocabularies above 262,144."""
    batch, depths, vocab = logits.shape
    if k > MAX_K or vocab > MAX_VOCAB:
        return twin.top_log_probs(logits, k, sharpness)
    if logits.dtype != torch.bfloat16:
        logits = logits.float()
    logits = logits.contiguous()
    per_thread = next(n for n in (8, 16, 32) if n * _THREADS * _MAX_CHUNKS >= vocab)
    if vocab > 8 * _THREADS * 8 and per_thread == 8:
        per_thread = 16  # fewer chunks to merge
    rows, chunks = batch * depths, -(-vocab // (per_thread * _THREADS))
    device = logits.device
    log_probs = torch.empty(batch, depths, k, device=device)
    ids = torch.empty(batch, depths, k, dtype=torch.int64, device=device)
    partial_keys = torch.empty(rows * chunks * k, dtype=torch.int64, device=device)
    partial_sums = torch.empty(rows * chunks * 2, device=device)
    arrived = arrival_counters("top_log_probs", rows, device)
    module = cuda_module(
        "top_log_probs.cu", device,
        LOGIT_BF16=int(logits.dtype == torch.bfloat16), PER_THREAD=per_thread, MAX_K=64 if k <= 64 else 128,
    )  # fmt: skip
    module.launch(
        "top_log_probs", (chunks, rows, 1), _THREADS, 0,
        logits, sharpness, log_probs, ids, partial_keys, partial_sums, arrived, vocab, k, vocab, depths,
    )  # fmt: skip
    return log_probs, ids
