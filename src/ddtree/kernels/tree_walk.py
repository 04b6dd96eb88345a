"""Walking a batch of trees by the target's choices (slow twin)."""

from dataclasses import dataclass

import torch

from ddtree.kernels.tree_tensors import TreeTensors


@dataclass(frozen=True)
class AcceptedPaths:
    """What the target accepted, per sequence.

    Attributes:
        rows: int64 ``[batch, depths + 1]``: row 0 (the root), then the accepted rows; the last one repeats as padding.
        accepted: int64 ``[batch]``, number of accepted nodes, the root not counted.
        tokens: int64 ``[batch, depths + 1]``: the tokens of this round. The first ``accepted`` of them are those of the
            accepted nodes, the next one is the bonus token; what follows is padding.
        roots: int64 ``[batch]``, the bonus tokens: the next round's roots.
    """

    rows: torch.Tensor
    accepted: torch.Tensor
    tokens: torch.Tensor
    roots: torch.Tensor


def walk_tree(tree: TreeTensors, choices: torch.Tensor, depths: int) -> AcceptedPaths:
    """Follow, from the root down, the child that carries the target's choice until there is none.

    Args:
        tree: the verified trees.
        choices: int64 ``[batch, rows]``, the target's choice after each row.
        depths: the deepest a node can be.
    """
    parents = tree.parents.clone()
    parents[:, 0] = -1
    parents = torch.where(tree.alive, parents, -1)
    row = torch.zeros_like(tree.tokens[:, 0])
    accepted = torch.zeros_like(row)
    rows = [row]
    for _ in range(depths):
        choice = choices.gather(1, row[:, None])
        is_next = (parents == row[:, None]) & (tree.tokens == choice)
        found = is_next.any(dim=1)
        row = torch.where(found, is_next.int().argmax(dim=1), row)
        accepted = accepted + found.long()
        rows.append(row)
    path = torch.stack(rows, dim=1)
    tokens = choices.gather(1, path)
    return AcceptedPaths(path, accepted, tokens, tokens.gather(1, accepted[:, None])[:, 0])
