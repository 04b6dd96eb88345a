"""The draft tree: likely continuations of one committed token, the root."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

ROOT = -1
"""Parent of a node of depth 1. The root is not a node: it is already committed and is no guess."""


@dataclass(frozen=True)
class DraftTree:
    """A tree of ``n`` nodes below one root, best node first.

    A node's parent always stands before it, so one pass from the front visits parents before children.

    Attributes:
        token_ids: int64 ``[n]``, the token that each node proposes.
        parents: int64 ``[n]``, index of the parent node, or ``ROOT``.
        depths: int64 ``[n]``, 1 for a child of the root; the node's position is ``committed + depth``.
        log_scores: float32 ``[n]``, natural log of the product of the drafter's probabilities from depth 1 down to
            the node.
    """

    token_ids: npt.NDArray[np.int64]
    parents: npt.NDArray[np.int64]
    depths: npt.NDArray[np.int64]
    log_scores: npt.NDArray[np.float32]
    _child_by_token: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        children: dict[tuple[int, int], int] = {}
        for node, (parent, token) in enumerate(zip(self.parents.tolist(), self.token_ids.tolist(), strict=True)):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: a parent must stand before its children")
            expected_depth = 1 if parent == ROOT else int(self.depths[parent]) + 1
            if int(self.depths[node]) != expected_depth:
                raise ValueError(
                    f"node {node} has depth {int(self.depths[node])}, its parent asks for {expected_depth}"
                )
            if (parent, token) in children:
                raise ValueError(f"nodes {children[parent, token]} and {node} are siblings with one token {token}")
            children[parent, token] = node
        object.__setattr__(self, "_child_by_token", children)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def depth(self) -> int:
        """Depth of the deepest node; 0 for an empty tree."""
        return int(self.depths.max(initial=0))

    def child(self, node: int, token_id: int) -> int | None:
        """The child of ``node`` (or of ``ROOT``) that carries ``token_id``, if it is in the tree."""
        return self._child_by_token.get((node, token_id))

    def path(self, node: int) -> list[int]:
        """Nodes from depth 1 down to ``node``, which is the last; empty for ``ROOT``."""
        path = []
        while node != ROOT:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    def tokens_to(self, node: int) -> list[int]:
        """Tokens from depth 1 down to ``node``."""
        return [int(self.token_ids[i]) for i in self.path(node)]

    def ancestor_mask(self) -> npt.NDArray[np.bool_]:
        """bool ``[n + 1, n + 1]``: row ``i`` marks what it may attend to. Row 0 is the root, ``i`` node ``i - 1``."""
        mask = np.zeros((len(self) + 1, len(self) + 1), dtype=np.bool_)
        mask[0, 0] = True
        for row, parent in enumerate(self.parents.tolist(), start=1):
            mask[row] = mask[parent + 1]
            mask[row, row] = True
        return mask
