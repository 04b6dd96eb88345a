"""Prefill: commit a prompt chunk by chunk, and choose the first root."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ddtree.engine.constraint import Constraint, TreeOnHost
from ddtree.engine.flight import pack
from ddtree.engine.logprobs import tell_logprobs
from ddtree.engine.round import inject_taps, place
from ddtree.engine.state import Batch, DeviceState, SamplingFlags
from ddtree.kernels.tree_tensors import root_only
from ddtree.models.drafter import Drafter
from ddtree.models.layer import Pass
from ddtree.models.target import Target


@dataclass(frozen=True)
class PrefillKind:
    """What the chunks of one prefill have in common.

    Attributes:
        is_last: they end their prompts.
        drafts: their taps go to the drafter.
        flags: what choosing the first tokens takes.
    """

    is_last: bool
    drafts: bool
    flags: SamplingFlags


def prefill_chunk(
    state: DeviceState,
    batch: Batch,
    target: Target,
    drafter: Drafter | None,
    tokens: torch.Tensor,
    is_last: bool,
    constraints: Seq[Constraint] = (),
    valid: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Commit the next tokens of prompts; after the last chunk, choose what follows them.

    Args:
        batch: ``committed`` says how much of each prompt is done.
        drafter: gets the chunk's taps at once; None where nobody will draft.
        tokens: int64 ``[batch, rows]``.
        is_last: the chunk ends the prompts; the chosen first tokens become the roots.
        constraints: one for each sequence, or none.
        valid: int64 ``[batch]``, how many rows of each sequence are its own, the others being padding; None for all.

    Returns:
        after the last chunk the first tokens as a `Flight` of one token a row wants them, with their log-probabilities
        where those are told.
    """
    n, rows = tokens.shape
    offset = state.row_numbers(n, rows)
    placement = place(state, batch, target.rope, target.kernels, batch.committed, offset, valid)
    causal = torch.ones(rows, rows, dtype=torch.bool, device=tokens.device).tril().expand(n, -1, -1)
    attention = target.kernels.tree_attention(
        batch.block_table, batch.committed, offset, causal, state.page_tokens, batch.context_bound, None, target.dtype
    )
    tap_layers = drafter.config.tap_layers if drafter else ()
    hidden = target.forward(tokens, Pass(placement, attention), state.target_cache, tap_layers)
    if drafter is not None and hidden.taps is not None:
        inject_taps(state, batch, drafter, hidden.taps, batch.committed, valid)
    if valid is None:
        valid = torch.full_like(batch.committed, rows)
    state.committed[batch.slots] = batch.committed + valid
    if not is_last:
        return None
    end = (valid - 1)[:, None]
    logits = target.logits(hidden.last.gather(1, end[..., None].expand(-1, -1, hidden.last.shape[-1])))
    last = batch.committed + valid - 1
    tree = root_only(tokens.gather(1, end)[:, 0])
    allowed = TreeOnHost(tree).allowed(constraints, logits.shape[-1]) if constraints else None
    roots = target.kernels.choose(logits, batch.sampling, tree, last, allowed)[:, 0]
    state.roots[batch.slots] = roots
    state.count_tokens(batch.slots, roots[:, None], lambda: torch.ones_like(roots[:, None], dtype=torch.bool))
    packed = pack(torch.zeros_like(roots), roots[:, None])
    if not batch.tells_logprobs:
        return packed
    told = tell_logprobs(logits, torch.zeros_like(roots)[:, None], roots[:, None], target.kernels)
    return torch.cat((packed, told), dim=1)
