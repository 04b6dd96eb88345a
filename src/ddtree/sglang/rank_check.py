"""A check, off by default, that all tensor-parallel ranks verify the same trees. It reads on the host every round."""

import logging

import torch

from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.sglang.head import Group

logger = logging.getLogger(__name__)

TELL_EVERY_ROUNDS = 50


class RankCheck:
    """Compares the trees of a round between ranks.

    Args:
        group: the ranks.
        is_teller: whether this rank logs how many rounds were alike.
    """

    def __init__(self, group: Group, is_teller: bool) -> None:
        self._group, self._is_teller = group, is_teller
        self.rounds = 0

    def __call__(self, tree: TreeTensors) -> None:
        """Compare tokens and parents of every row.

        Raises:
            RuntimeError: two ranks built different trees; all ranks raise it, so that none waits for another.
        """
        mine = torch.stack((tree.tokens, tree.parents))
        everyones = mine.new_empty(self._group.world_size * mine.numel())
        self._group.all_gather_into_tensor(everyones, mine.flatten())
        first, *others = everyones.view(self._group.world_size, -1).unbind()
        differing = [rank for rank, theirs in enumerate(others, 1) if not torch.equal(first, theirs)]
        if differing:
            raise RuntimeError(
                f"DDTREE: ranks {differing} built other trees than rank 0 in round {self.rounds}: please report this; "
                "--speculative-algorithm DFLASH runs without trees"
            )
        self.rounds += 1
        if self._is_teller and self.rounds % TELL_EVERY_ROUNDS == 0:
            logger.info("DDTREE: trees of %d rounds alike on %d ranks", self.rounds, self._group.world_size)
