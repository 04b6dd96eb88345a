"""One round of DDTree (arXiv 2604.12989): draft a tree, verify it in one pass, commit what the target itself chose."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ddtree.engine.budget_policy import CUTS
from ddtree.engine.constraint import Constraint, TreeOnHost
from ddtree.engine.logprobs import tell_logprobs
from ddtree.engine.speculation import DraftShape
from ddtree.engine.state import Batch, DeviceState
from ddtree.kernels.kernel_set import KernelSet
from ddtree.kernels.placement import Placement
from ddtree.kernels.tree_tensors import TreeTensors, root_only
from ddtree.kernels.tree_walk import AcceptedPaths
from ddtree.models.drafter import Drafter
from ddtree.models.layer import AttentionCall, Pass
from ddtree.models.rope import RotaryEmbedding
from ddtree.models.target import Target


@dataclass(frozen=True)
class Seen:
    """What the target made of a tree.

    Attributes:
        logits: ``[batch, rows, vocab]``, what follows each row.
        taps: ``[batch, rows, n_taps * hidden]``, or None where nobody drafts.
        slots: int64 ``[batch, rows]``, where the rows' keys and values stand in the cache.
    """

    logits: torch.Tensor
    taps: torch.Tensor | None
    slots: torch.Tensor


@dataclass(frozen=True)
class Round:
    """What a round leaves behind.

    ``packed`` is as in `ddtree.kernels.advance.Moves`, then come the forecast and the log-probabilities, where there
    are any.
    """

    tree: TreeTensors
    path: AcceptedPaths
    packed: torch.Tensor


def decode_round(
    state: DeviceState,
    batch: Batch,
    target: Target,
    drafter: Drafter | None,
    shape: DraftShape,
    constraints: Seq[Constraint] = (),
) -> Round:
    """Commit at least one token to every sequence of the batch.

    The numbers are those of "One round" in docs/concepts.md: inject, draft, build, verify, choose and walk, commit.
    A round without a drafter's part (mode `ar`) verifies the root alone, and so is one autoregressive step. With
    ``constraints``, one for each sequence, the host takes part in the round.
    """
    kernels = target.kernels
    depths = 0
    if drafter is not None and (shape.budget or shape.follows):
        inject(state, batch, drafter)  # 1
    if drafter is None or not shape.budget:
        tree = root_only(batch.roots)
    else:
        depths = drafter.config.block_size - 1
        logits = draft(state, batch, drafter)  # 2
        log_probs, token_ids = kernels.top_log_probs(logits, min(shape.top_k, logits.shape[-1]), batch.sharpness)
        tree = kernels.build_tree(log_probs, token_ids, batch.roots, shape.budget, batch.room)  # 3
    taps = drafter.config.tap_layers if drafter is not None and (depths or shape.follows) else ()
    on_host = TreeOnHost(tree) if constraints else None
    seen = verify(state, batch, target, tree, taps)  # 4
    allowed = on_host.allowed(constraints, seen.logits.shape[-1]) if on_host else None
    choices = kernels.choose(seen.logits, batch.sampling, tree, batch.committed, allowed)
    path = kernels.walk_tree(tree, choices, depths)  # 5
    packed = commit(state, batch, target, path, seen)  # 6
    if shape.forecasts:
        packed = kernels.forecast(tree, path, packed, CUTS, depths)
    if batch.tells_logprobs:
        told = tell_logprobs(seen.logits, path.rows, path.tokens, kernels)
        packed = torch.cat((packed, told), dim=1)
    return Round(tree, path, packed)


def inject(state: DeviceState, batch: Batch, drafter: Drafter) -> None:
    """Write the taps of the tokens committed last round into the drafter's cache; the root's own come a round later."""
    inject_taps(state, batch, drafter, state.taps[batch.slots], batch.injected, batch.pending)


def inject_taps(
    state: DeviceState,
    batch: Batch,
    drafter: Drafter,
    taps: torch.Tensor,
    base: torch.Tensor,
    valid: torch.Tensor | None,
) -> None:
    """Write taps ``[batch, rows, n_taps * hidden]`` at positions from ``base`` on, the first ``valid`` rows of them."""
    assert state.drafter_cache is not None
    offset = state.row_numbers(taps.shape[0], taps.shape[1])
    placement = place(state, batch, drafter.rope, drafter.kernels, base, offset, valid)
    drafter.inject(taps, placement, state.drafter_cache)


def place(
    state: DeviceState,
    batch: Batch,
    rope: RotaryEmbedding,
    kernels: KernelSet,
    base: torch.Tensor,
    depths: torch.Tensor,
    valid: torch.Tensor | None = None,
) -> Placement:
    """Slots and angles of rows at positions ``base + depths``; see `ddtree.kernels.placement.place_rows`."""
    frequencies = rope.frequencies(lambda: base[:, None] + depths, batch.prompt_tokens)
    return kernels.place_rows(base, depths, valid, batch.block_table, state.page_tokens, frequencies, rope.scale)


def draft(state: DeviceState, batch: Batch, drafter: Drafter) -> torch.Tensor:
    """Logits of depths 1 .. block_size - 1, ``[batch, depths, vocab]``, from one pass over the block."""
    assert state.drafter_cache is not None
    config, n = drafter.config, len(batch.slots)
    offset = state.row_numbers(n, config.block_size)
    both_ways = state.block_sees(n)

    def attention(sees: torch.Tensor) -> AttentionCall:
        return drafter.kernels.tree_attention(
            batch.block_table, batch.committed, offset, sees, state.page_tokens, batch.context_bound,
            state.draft_window, drafter.target.dtype,
        )  # fmt: skip

    full = attention(both_ways.tril() if config.is_causal else both_ways)
    sliding = attention(both_ways.tril()) if any(config.sliding_windows) and config.sliding_block == "causal" else full

    placement = place(state, batch, drafter.rope, drafter.kernels, batch.committed, offset)
    run = Pass(placement, lambda q, k, v, window: (full if window is None else sliding)(q, k, v, window))
    return drafter.draft(batch.roots, run, state.drafter_cache)


def verify(state: DeviceState, batch: Batch, target: Target, tree: TreeTensors, tap_layers: tuple[int, ...]) -> Seen:
    """Run root and nodes through the target at ``committed + depth``, each seeing the prefix and its own ancestors."""
    placement = place(state, batch, target.rope, target.kernels, batch.committed, tree.depths)
    attention = target.kernels.tree_attention(
        batch.block_table, batch.committed, tree.depths, tree.ancestors, state.page_tokens, batch.context_bound,
        None, target.dtype,
    )  # fmt: skip
    hidden = target.forward(tree.tokens, Pass(placement, attention), state.target_cache, tap_layers)
    return Seen(target.logits(hidden.last), hidden.taps, placement.slots)


def commit(state: DeviceState, batch: Batch, target: Target, path: AcceptedPaths, seen: Seen) -> torch.Tensor:
    """Move the accepted path's keys and values behind the committed ones, keep its taps, and take the bonus as root.

    Returns:
        what the host wants to know, as in `ddtree.kernels.advance.Moves`.
    """
    drafts = seen.taps is not None
    moves = target.kernels.advance(
        path, seen.slots, batch.block_table, state.page_tokens,
        batch.slots, state.committed, state.roots, state.pending_taps if drafts else None,
    )  # fmt: skip
    if seen.slots.shape[1] > 1:
        target.kernels.move_rows(state.target_cache, moves.source, moves.target)
    if seen.taps is not None:
        target.kernels.keep_taps(state.taps, batch.slots, seen.taps, path.rows)
    step = state.row_numbers(*path.rows.shape)
    state.count_tokens(batch.slots, path.tokens, lambda: step <= path.accepted[:, None])
    return moves.packed
