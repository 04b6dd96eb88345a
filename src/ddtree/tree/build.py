"""Best-first construction of a draft tree from per-depth log-probabilities (arXiv 2604.12989, section 3)."""

import heapq

import numpy as np
import numpy.typing as npt

from ddtree.tree.draft_tree import ROOT, DraftTree

Ranks = tuple[int, ...]


def order_key(log_score: np.float32, ranks: Ranks) -> tuple[float, int, Ranks]:
    """Sort key of a prefix: better score first, then the lower depth, then the lower tuple of ranks."""
    return -float(log_score), len(ranks), ranks


def build(
    log_probs: npt.NDArray[np.float32],
    token_ids: npt.NDArray[np.int64],
    budget: int,
    max_depth: int | None = None,
) -> DraftTree:
    """Choose the ``budget`` prefixes with the highest score.

    The score of a prefix is the float32 sum of its log-probabilities, added from depth 1 down. Scores never rise
    along a path, and ties go to the lower depth, so the chosen set always contains the ancestors of its members.
    With one candidate per depth the result is a chain.

    Args:
        log_probs: float32 ``[depths, k]``, natural log-probabilities of the candidates of each depth, best first.
            A candidate of probability 0 (``-inf``) is never chosen.
        token_ids: int64 ``[depths, k]``, the candidates' tokens.
        budget: number of nodes, root not counted; fewer come back where there are not as many prefixes.
        max_depth: cut the tree below this depth (the context's end).

    Raises:
        ValueError: shapes differ, the budget is negative, or log-probabilities are NaN, above 0 or not descending.
    """
    log_probs = np.asarray(log_probs, dtype=np.float32)
    if log_probs.ndim != 2 or log_probs.shape != token_ids.shape:
        raise ValueError(f"log_probs {log_probs.shape} and token_ids {token_ids.shape} must both be [depths, k]")
    if budget < 0:
        raise ValueError(f"budget {budget} is negative")
    if np.isnan(log_probs).any() or (log_probs > 0).any() or (log_probs[:, 1:] > log_probs[:, :-1]).any():
        raise ValueError("log_probs must be at most 0 and descend along each row, without NaN")
    depths, width = log_probs.shape
    depths = depths if max_depth is None else min(depths, max(max_depth, 0))

    heap: list[tuple[tuple[float, int, Ranks], np.float32, int]] = []

    def offer(parent: int, parent_score: np.float32, ranks: Ranks) -> None:
        depth, rank = len(ranks), ranks[-1]
        if depth <= depths and rank < width:
            score = np.float32(parent_score + log_probs[depth - 1, rank])
            if score > -np.inf:
                heapq.heappush(heap, (order_key(score, ranks), score, parent))

    tokens: list[int] = []
    parents: list[int] = []
    node_depths: list[int] = []
    scores: list[np.float32] = []
    offer(ROOT, np.float32(0), (0,))
    while heap and len(tokens) < budget:
        (_, depth, ranks), score, parent = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(int(token_ids[depth - 1, ranks[-1]]))
        parents.append(parent)
        node_depths.append(depth)
        scores.append(score)
        parent_score = np.float32(0) if parent == ROOT else scores[parent]
        offer(parent, parent_score, (*ranks[:-1], ranks[-1] + 1))
        offer(node, score, (*ranks, 0))
    return DraftTree(
        np.array(tokens, dtype=np.int64),
        np.array(parents, dtype=np.int64),
        np.array(node_depths, dtype=np.int64),
        np.array(scores, dtype=np.float32),
    )
