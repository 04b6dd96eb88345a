"""Batches of random trees for tests, beside the oracle's."""

import numpy as np
import torch

from ddtree.kernels.tree_build import build_tree
from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.tree import build


def random_trees(rng: np.random.Generator, batch: int, budget: int, depths: int, k: int) -> tuple[TreeTensors, list]:
    """A batch of trees, some cut short by the context's end, and the oracle's."""
    logits = rng.normal(size=(batch, depths, k)).astype(np.float32) * rng.choice([0.0, 1.0, 3.0])
    log_probs = np.sort(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[..., ::-1].clip(max=0).copy()
    ids = np.stack([[rng.permutation(50)[:k] for _ in range(depths)] for _ in range(batch)]).astype(np.int64)
    room = rng.integers(0, depths + 1, batch)
    roots = rng.integers(0, 50, batch)
    oracle = [build(lp, i, budget, int(r)) for lp, i, r in zip(log_probs, ids, room, strict=True)]
    arguments = [torch.from_numpy(a) for a in (log_probs, ids, roots)]
    return build_tree(*arguments, budget, torch.from_numpy(room)), oracle
