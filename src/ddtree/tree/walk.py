"""Walking a draft tree by the target's own choices."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.tree.draft_tree import ROOT, DraftTree


@dataclass(frozen=True)
class Walk:
    """What one verified tree yields.

    Attributes:
        path: accepted nodes in order, from depth 1 down; empty where the root's choice is not in the tree.
        bonus_token: the target's choice at the last accepted row, which no node carries; the next root.
    """

    path: tuple[int, ...]
    bonus_token: int


def walk(tree: DraftTree, choices: Sequence[int]) -> Walk:
    """Follow the child that carries the target's choice until there is none.

    Args:
        tree: the draft tree.
        choices: ``[n + 1]`` tokens: the target's choice after the root, then after each node.
    """
    if len(choices) != len(tree) + 1:
        raise ValueError(f"{len(choices)} choices for {len(tree) + 1} rows (the root and {len(tree)} nodes)")
    path: list[int] = []
    node = ROOT
    while (child := tree.child(node, int(choices[node + 1]))) is not None:
        path.append(child)
        node = child
    return Walk(tuple(path), int(choices[node + 1]))
