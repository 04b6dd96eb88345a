"""What follows the target's verify pass: walk, commit, K/V move, taps into the drafter's K/V.

For plain greedy batches all of it is recorded at the end of SGLang's own verify graph, so that the host launches
nothing more. Sampled batches switch the recorded tail off by a flag on the device and run the same steps one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.sglang.kernel_choice import WorkerKernels
from ddtree.sglang.settings import TreeSettings


@dataclass(frozen=True)
class Walked:
    """What a round brought, per sequence.

    Attributes:
        tokens: int64 ``[batch, depths + 1]``; the first ``lengths`` are committed or, the last of them, the next root.
        lengths: int32 ``[batch]``, committed tokens of this round.
        committed: int64 ``[batch]``, cached tokens after it.
        roots: int64 ``[batch]``, the next roots.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    committed: torch.Tensor
    roots: torch.Tensor


class VerifyTail:
    """The steps after a verify pass.

    Args:
        settings: the shape of a round.
        kernels: what to compute with.
        trees: gives the trees that are being verified, for a batch size.
        move: moves K/V of a `ddtree.sglang.commit.Commit`.
        inject: takes taps ``[rows, features]`` and a commit, and writes the drafter's K/V of its first ``lengths``.
        max_batch: sequences at most in a recorded tail.
        device: where it runs.
    """

    def __init__(
        self,
        settings: TreeSettings,
        kernels: WorkerKernels,
        trees: Callable[[int], TreeTensors],
        move: Callable[[Any], None],
        inject: Callable[[torch.Tensor, Any], None],
        max_batch: int,
        device: torch.device,
    ) -> None:
        self._settings, self._kernels, self._trees = settings, kernels, trees
        self._move, self._inject = move, inject
        self._live = torch.ones(1, dtype=torch.int32, device=device)
        self._is_live = True
        self._kept = Walked(
            torch.zeros(max_batch, settings.depths + 1, dtype=torch.int64, device=device),
            torch.zeros(max_batch, dtype=torch.int32, device=device),
            torch.zeros(max_batch, dtype=torch.int64, device=device),
            torch.zeros(max_batch, dtype=torch.int64, device=device),
        )

    def switch(self, live: bool) -> None:
        """Whether the recorded tail of the next replay moves and writes, or only walks in vain."""
        if live != self._is_live:
            self._live.fill_(int(live))
            self._is_live = live

    def record(self, logits: torch.Tensor, taps: torch.Tensor, slots: torch.Tensor, committed: torch.Tensor) -> None:
        """The greedy tail, for a capture; `results` holds what it brought.

        Args:
            logits: ``[batch * width, vocab]``; taps: ``[batch * width, features]``; slots: int64 ``[batch * width]``;
            committed: int64 ``[batch]``.
        """
        batch, width = len(committed), self._settings.width
        tree = self._trees(batch)
        chosen = self._kernels.choose(logits.view(batch, width, -1), None, tree, committed)
        walked, commit = self._walk(chosen, tree, committed, slots.view(batch, width))
        for kept, new in zip(vars(self._kept).values(), vars(walked).values(), strict=True):
            kept[:batch].copy_(new)
        commit.lengths.mul_(self._live)
        self._move(commit)
        self._inject(taps.index_select(0, commit.rows), commit)

    def results(self, batch: int) -> Walked:
        """What the last replay brought, in tensors that the next replay does not overwrite."""
        return Walked(*(kept[:batch].clone() for kept in vars(self._kept).values()))

    def run(
        self,
        chosen: torch.Tensor,
        taps: torch.Tensor,
        slots: torch.Tensor,
        committed: torch.Tensor,
        publish: Callable[[torch.Tensor], Any] | None,
    ) -> Walked:
        """The tail, step by step, for choices already made.

        Args:
            chosen: int64 ``[batch, width]``.
            taps: ``[batch * width, features]``.
            slots: int64 ``[batch, at least width]``.
            committed: int64 ``[batch]``.
            publish: told the new lengths as soon as they are known.
        """
        walked, commit = self._walk(chosen, self._trees(len(committed)), committed, slots)
        if publish is not None:
            publish(walked.committed)
        self._move(commit)
        self._inject(taps.index_select(0, commit.rows), commit)
        return walked

    def _walk(
        self, chosen: torch.Tensor, tree: TreeTensors, committed: torch.Tensor, slots: torch.Tensor
    ) -> tuple[Walked, Any]:
        paths = self._kernels.walk_tree(tree, chosen, self._settings.depths)
        commit = self._kernels.commit_paths(paths, committed, slots, self._settings.width)
        return Walked(paths.tokens, commit.lengths, commit.committed, paths.roots), commit
