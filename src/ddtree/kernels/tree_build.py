"""Best-first tree build for a batch, without a loop over nodes (slow twin)."""

import torch

from ddtree.kernels.tree_tensors import DEAD, TreeTensors, sees


def build_tree(
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    roots: torch.Tensor,
    budget: int,
    max_depths: torch.Tensor,
) -> TreeTensors:
    """The trees that `ddtree.tree.build` builds, for every sequence of a batch.

    A beam goes down level by level and keeps the ``budget`` best prefixes of each depth, in the order of their rank
    tuples, so that a stable sort by score settles ties as the oracle does. The best ``budget`` prefixes of all levels
    together are the tree: scores never rise along a path, hence no better node can hide below a prefix that fell off.

    Args:
        log_probs: float32 ``[batch, depths, k]``, best first, at most 0.
        token_ids: int64 ``[batch, depths, k]``.
        roots: int64 ``[batch]``, the committed tokens on top.
        budget: nodes of a tree without the root, at least 1.
        max_depths: int64 ``[batch]``, no node deeper than this (the context's end).
    """
    batch, depths, k = log_probs.shape
    device = log_probs.device
    level_depth = torch.arange(1, depths + 1, device=device)
    reachable = level_depth[None, :, None] <= max_depths[:, None, None]
    log_probs = torch.where(reachable, log_probs, DEAD)

    beam = torch.full((batch, budget), DEAD, device=device)
    beam[:, 0] = 0.0
    scores, ranks, parents = [], [], []
    for level_log_probs in log_probs.unbind(1):
        candidates = (beam[:, :, None] + level_log_probs[:, None, :]).flatten(1)
        best = candidates.sort(dim=1, descending=True, stable=True).indices[:, :budget]
        best = best.sort(dim=1).values
        beam = candidates.gather(1, best)
        scores.append(beam)
        ranks.append(best % k)
        parents.append(best // k)

    all_scores = torch.cat(scores, dim=1)
    chosen = all_scores.sort(dim=1, descending=True, stable=True).indices[:, :budget]
    chosen_scores = all_scores.gather(1, chosen)
    alive = chosen_scores > DEAD
    level = chosen // budget
    rank = torch.cat(ranks, dim=1).gather(1, chosen)
    tokens = token_ids.flatten(1).gather(1, level * k + rank)

    row_of = torch.zeros_like(all_scores, dtype=torch.int64)
    row_of.scatter_(1, chosen, torch.arange(1, budget + 1, device=device).expand(batch, budget))
    parent_entry = torch.cat(parents, dim=1).gather(1, chosen) + (level - 1) * budget
    parent_row = torch.where(level > 0, row_of.gather(1, parent_entry.clamp(0, all_scores.shape[1] - 1)), 0)

    zero = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    parent_rows = torch.cat((zero, torch.where(alive, parent_row, 0)), dim=1)
    return TreeTensors(
        tokens=torch.cat((roots[:, None], torch.where(alive, tokens, 0)), dim=1),
        parents=parent_rows,
        depths=torch.cat((zero, torch.where(alive, level + 1, 0)), dim=1),
        scores=torch.cat((zero.float(), chosen_scores), dim=1),
        ancestors=sees(parent_rows, depths),
    )
