"""Cross-entropy and divergence of rows of logits, one program a row."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
import torch
import triton
import triton.language as tl

from ddtree.kernels.draft_loss import Distributions

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _statistics_kernel(logits, labels, least, log_sums, label_logits, tops, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    bound = tl.load(least + row)
    highest = float("-inf")
    total = 0.0
    top_logit = float("-inf")
    top = 0
    for start in range(0, vocab, BLOCK):
        at = start + column
        value = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        block_top = tl.max(value, axis=0)
        where = start + tl.argmax(value, axis=0)
        top = tl.where(block_top > top_logit, where, top)  # the first among equals
        top_logit = tl.maximum(top_logit, block_top)
        # The largest logit always counts, so that the running maximum is one of those that do.
        higher = tl.maximum(highest, block_top)
        counted = tl.where((value >= bound) & (at < vocab), tl.exp(value - higher), 0.0)
        total = total * tl.exp(highest - higher) + tl.sum(counted, axis=0)
        highest = higher
    tl.store(log_sums + row, highest + tl.log(total))
    tl.store(tops + row, top)
    tl.store(label_logits + row, tl.load(logits + row * vocab + tl.load(labels + row)).to(tl.float32))


@triton.jit
def _gradient_kernel(
    logits, log_sums, labels, weights, token_share, wanted, wanted_least, wanted_log_sums, wanted_row, divergences,
    vocab, HAS_WANTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    weight = tl.load(weights + row)
    log_sum = tl.load(log_sums + row)
    label = tl.load(labels + row)
    other = row
    bound = 0.0
    other_log_sum = 0.0
    if HAS_WANTED:
        other = tl.load(wanted_row + row)
        bound = tl.load(wanted_least + other)
        other_log_sum = tl.load(wanted_log_sums + other)
    divergence = 0.0
    for start in range(0, vocab, BLOCK):
        at = start + column
        inside = at < vocab
        value = tl.load(logits + row * vocab + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.exp(value - log_sum) - tl.where(at == label, token_share, 0.0)
        if HAS_WANTED:
            other_value = tl.load(wanted + other * vocab + at, mask=inside, other=float("-inf")).to(tl.float32)
            counts = inside & (other_value >= bound)
            log_p = tl.where(counts, other_value - other_log_sum, 0.0)
            p = tl.where(counts, tl.exp(log_p), 0.0)
            divergence += tl.sum(p * (log_p - value + log_sum), axis=0)
            gradient -= (1.0 - token_share) * p
        tl.store(logits + row * vocab + at, (gradient * weight).to(logits.dtype.element_ty), mask=inside)
    tl.store(divergences + row, divergence)


def row_statistics(
    logits: torch.Tensor, labels: torch.Tensor, least: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ddtree.kernels.draft_loss.row_statistics`; ``least`` is never above the row's largest logit."""
    rows, vocab = logits.shape
    log_sums = torch.empty(rows, dtype=torch.float32, device=logits.device)
    label_logits = torch.empty_like(log_sums)
    tops = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _statistics_kernel[(rows,)](
        logits, labels.contiguous(), least.contiguous(), log_sums, label_logits, tops, vocab,
        BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return log_sums, label_logits, tops


def replace_by_gradient(
    logits: torch.Tensor,
    log_sums: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    token_share: float,
    wanted: Distributions | None,
    wanted_row: torch.Tensor,
) -> torch.Tensor:
    """See `ddtree.kernels.draft_loss.replace_by_gradient`."""
    rows, vocab = logits.shape
    divergences = torch.empty_like(log_sums)
    other = wanted or Distributions(logits, log_sums, log_sums)  # of which nothing is read where nothing is wanted
    _gradient_kernel[(rows,)](
        logits, log_sums, labels.contiguous(), weights.contiguous(), token_share,
        other.logits, other.least.contiguous(), other.log_sums, wanted_row.contiguous(), divergences, vocab,
        HAS_WANTED=wanted is not None, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return divergences
