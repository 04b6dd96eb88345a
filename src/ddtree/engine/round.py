"""One round of DDTree (arXiv 2604.12989): draft a tree, verify it in one pass, commit what the target itself chose."""

from dataclasses import dataclass

import torch

from ddtree.engine.speculation import DraftShape
from ddtree.engine.state import Batch, DeviceState
from ddtree.kernels.paged import TRASH_PAGE, slots_of
from ddtree.kernels.tree_tensors import TreeTensors, root_only
from ddtree.kernels.tree_walk import AcceptedPaths
from ddtree.models.drafter import Drafter
from ddtree.models.layer import AttentionCall, Pass
from ddtree.models.target import Target


@dataclass(frozen=True)
class Seen:
    """What the target made of a tree.

    Attributes:
        logits: float32 ``[batch, rows, vocab]``, what follows each row.
        taps: ``[batch, rows, n_taps * hidden]``, or None where nobody drafts.
        slots: int64 ``[batch, rows]``, where the rows' keys and values stand in the cache.
    """

    logits: torch.Tensor
    taps: torch.Tensor | None
    slots: torch.Tensor


def decode_round(
    state: DeviceState, batch: Batch, target: Target, drafter: Drafter | None, shape: DraftShape
) -> tuple[TreeTensors, AcceptedPaths]:
    """Commit at least one token to every sequence of the batch.

    A round without a drafter's part (mode `ar`) verifies the root alone, and so is one autoregressive step.
    """
    kernels = target.kernels
    depths = 0
    tree = root_only(batch.roots)
    if drafter is not None and shape.budget:
        depths = drafter.config.block_size - 1
        inject(state, batch, drafter)  # 1
        logits = draft(state, batch, drafter)  # 2
        log_probs, token_ids = kernels.top_log_probs(logits, min(shape.top_k, logits.shape[-1]))
        tree = kernels.build_tree(log_probs, token_ids, batch.roots, shape.budget, room_below(state, batch))  # 3
    seen = verify(state, batch, target, tree, drafter.config.tap_layers if depths and drafter else ())  # 4
    choices = kernels.choose(seen.logits, batch.sampling, tree, batch.committed)
    path = kernels.walk_tree(tree, choices, depths)  # 5
    commit(state, batch, target, path, seen)  # 6
    return tree, path


def room_below(state: DeviceState, batch: Batch) -> torch.Tensor:
    """int64 ``[batch]``: how deep a tree may go, so that its path and the bonus token end within the context."""
    return (state.max_model_len - 2 - batch.committed).clamp_min(0)


def inject(state: DeviceState, batch: Batch, drafter: Drafter) -> None:
    """Write the taps of the tokens committed last round into the drafter's cache; the root's own come a round later."""
    pending = state.pending_taps[batch.slots]
    offset = torch.arange(state.taps.shape[1], device=pending.device)
    positions = (batch.committed - pending)[:, None] + offset
    inject_taps(state, batch, drafter, state.taps[batch.slots], positions, offset < pending[:, None])


def inject_taps(
    state: DeviceState, batch: Batch, drafter: Drafter, taps: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor
) -> None:
    """Write taps ``[batch, rows, n_taps * hidden]`` at ``positions``, where ``valid``."""
    assert state.drafter_cache is not None
    cos, sin = drafter.rope.cos_sin(positions, batch.prompt_tokens)
    slots = torch.where(valid, slots_of(batch.block_table, positions, state.page_tokens), TRASH_PAGE)
    drafter.inject(taps, cos, sin, state.drafter_cache, slots)


def draft(state: DeviceState, batch: Batch, drafter: Drafter) -> torch.Tensor:
    """Logits of depths 1 .. block_size - 1, float32 ``[batch, depths, vocab]``, from one pass over the block."""
    assert state.drafter_cache is not None
    config = drafter.config
    offset = torch.arange(config.block_size, device=batch.roots.device).expand(len(batch.slots), -1)
    both_ways = torch.ones(
        len(batch.slots), config.block_size, config.block_size, dtype=torch.bool, device=offset.device
    )

    def attention(sees: torch.Tensor) -> AttentionCall:
        return drafter.kernels.tree_attention(
            batch.block_table, batch.committed, offset, sees, state.page_tokens, batch.context_bound,
            state.draft_window, drafter.target.dtype,
        )  # fmt: skip

    full = attention(both_ways.tril() if config.is_causal else both_ways)
    sliding = attention(both_ways.tril()) if any(config.sliding_windows) and config.sliding_block == "causal" else full

    positions = batch.committed[:, None] + offset
    cos, sin = drafter.rope.cos_sin(positions, batch.prompt_tokens)
    slots = slots_of(batch.block_table, positions, state.page_tokens)
    run = Pass(cos, sin, slots, lambda q, k, v, window: (full if window is None else sliding)(q, k, v, window))
    return drafter.draft(batch.roots, run, state.drafter_cache)


def verify(state: DeviceState, batch: Batch, target: Target, tree: TreeTensors, tap_layers: tuple[int, ...]) -> Seen:
    """Run root and nodes through the target at ``committed + depth``, each seeing the prefix and its own ancestors."""
    rows = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    slots = slots_of(batch.block_table, batch.committed[:, None] + rows, state.page_tokens)
    cos, sin = target.rope.cos_sin(batch.committed[:, None] + tree.depths, batch.prompt_tokens)
    attention = target.kernels.tree_attention(
        batch.block_table, batch.committed, tree.depths, tree.ancestors, state.page_tokens, batch.context_bound,
        None, target.dtype,
    )  # fmt: skip
    hidden = target.forward(tree.tokens, Pass(cos, sin, slots, attention), state.target_cache, tap_layers)
    return Seen(target.logits(hidden.last), hidden.taps, slots)


def commit(state: DeviceState, batch: Batch, target: Target, path: AcceptedPaths, seen: Seen) -> None:
    """Move the accepted path's keys and values behind the committed ones, keep its taps, and take the bonus as root."""
    step = torch.arange(path.rows.shape[1], device=path.rows.device)
    is_committed = step <= path.accepted[:, None]
    if seen.slots.shape[1] > 1:
        source = seen.slots.gather(1, path.rows)
        place = slots_of(batch.block_table, batch.committed[:, None] + step, state.page_tokens)
        target.kernels.move_rows(
            state.target_cache, source.flatten(), torch.where(is_committed, place, TRASH_PAGE).flatten()
        )
    if seen.taps is not None:
        state.taps[batch.slots] = seen.taps.gather(1, path.rows[..., None].expand(-1, -1, seen.taps.shape[-1]))
        state.pending_taps[batch.slots] = path.accepted + 1
    state.committed[batch.slots] = batch.committed + path.accepted + 1
    state.roots[batch.slots] = path.roots
    state.count_tokens(batch.slots, path.tokens, is_committed)
