"""From the drafter's hidden states to a draft tree: LM head, top-k over all vocabulary shards, best-first build."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ddtree.kernels.sharpness import sharpness_of
from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.sglang.kernel_choice import WorkerKernels
from ddtree.sglang.sampling import request_temperatures
from ddtree.sglang.settings import TreeSettings


class Group(Protocol):
    """The ranks that share a vocabulary, as SGLang's group coordinator offers them."""

    world_size: int

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> Any: ...


@dataclass(frozen=True)
class HeadShard:
    """This rank's part of the target's LM head.

    Attributes:
        weight: ``[at least tokens, hidden]``; rows behind ``tokens`` are padding.
        tokens: vocabulary entries of this rank.
        first_token: id of the first of them; ranks own ascending ranges.
        group: None where one rank holds all.
    """

    weight: torch.Tensor
    tokens: int
    first_token: int
    group: Group | None


def head_shard(lm_head: Any, group: Group) -> HeadShard:
    """This rank's part of an LM head of SGLang's.

    Raises:
        ValueError: it is quantised, or it cannot be told which vocabulary it holds.
    """
    weight = getattr(lm_head, "weight", None)
    if weight is None or not torch.is_floating_point(weight) or weight.element_size() < 2:
        kind = "without plain weights" if weight is None else f"of {weight.dtype}"
        raise ValueError(f"DDTREE needs an LM head in 16 or 32 bits, this one is {kind}: keep it unquantised")
    shard = getattr(lm_head, "shard_indices", None)
    if shard is None and group.world_size > 1:
        raise ValueError("DDTREE cannot tell which vocabulary a rank's LM head holds: run with --tp-size 1")
    if shard is not None and int(shard.num_added_elements):
        raise ValueError("DDTREE does not support an LM head with added vocabulary: run without adapters")
    return HeadShard(
        weight=weight,
        tokens=int(weight.shape[0] if shard is None else shard.num_org_elements),
        first_token=0 if shard is None else int(shard.org_vocab_start_index),
        group=group if group.world_size > 1 else None,
    )


class TreeHead:
    """Builds a tree a sequence, into tensors of fixed addresses, so that it can be captured in the draft's CUDA graph.

    Args:
        shard: this rank's part of the LM head.
        settings: the shape of the trees.
        max_batch: sequences at most.
        context_tokens: positions that the target has; no node stands behind them.
        kernels: what to compute with.
    """

    def __init__(
        self,
        shard: HeadShard,
        settings: TreeSettings,
        max_batch: int,
        context_tokens: int,
        kernels: WorkerKernels,
    ) -> None:
        self._shard, self._settings, self._kernels = shard, settings, kernels
        self._last_position = context_tokens - 1
        self._ranks = 1 if shard.group is None else shard.group.world_size
        self._k = min(settings.topk_cap, shard.tokens)
        device, width = shard.weight.device, settings.width
        self._of_greedy = sharpness_of(settings.draft_temperature, 0.0)
        self._sharpness, self._all_greedy = torch.full((max_batch,), self._of_greedy, device=device), True
        tokens, parents, depths = torch.zeros(3, max_batch, width, dtype=torch.int64, device=device)
        self._out = TreeTensors(
            tokens, parents, depths,
            torch.zeros(max_batch, width, device=device),
            torch.zeros(max_batch, width, width, dtype=torch.bool, device=device),
        )  # fmt: skip
        if self._ranks > 1:
            rows, columns = max_batch * settings.depths, 2 * self._k + 1
            self._mine = torch.zeros(rows, columns, device=device)
            self._everyones = torch.zeros(self._ranks * rows, columns, device=device)

    def __call__(self, hidden: torch.Tensor, block_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Build; `trees` holds the result.

        Args:
            hidden: ``[batch * block_size, hidden]``, the drafter's last hidden states.
            block_ids: int64 ``[batch * block_size]``; the first of each block is the root.
            positions: int64 ``[batch * block_size]``; the first of each block is the root's.
        """
        block, depths = self._settings.block_size, self._settings.depths
        batch = hidden.shape[0] // block
        drafted = hidden.view(batch, block, -1)[:, 1 : 1 + depths]
        log_probs, ids = self.top_log_probs(drafted)
        roots = block_ids.view(batch, block)[:, 0].contiguous()
        room = (self._last_position - positions.view(batch, block)[:, 0]).clamp_min(0)
        built = self._kernels.build_tree(log_probs, ids, roots, self._settings.budget, room)
        out = self.trees(batch)
        for kept, new in zip(_fields(out), _fields(built), strict=True):
            kept.copy_(new)

    def take_temperatures(self, info: Any, batch: int) -> None:
        """Before a call or its replay: how the batch samples.

        Args:
            info: SGLang's ``SamplingBatchInfo``, or None for argmax. Where it samples, greedy requests take one token.
            batch: its requests.
        """
        greedy = info is None or info.is_all_greedy
        if (greedy and self._all_greedy) or self._settings.draft_temperature == 1.0:
            return
        if greedy:
            self._sharpness.fill_(self._of_greedy)
        else:
            temperatures = request_temperatures(info).double()
            self._sharpness[:batch] = sharpness_of(self._settings.draft_temperature, temperatures)
        self._all_greedy = greedy

    def trees(self, batch: int) -> TreeTensors:
        """The trees of the last call, the first ``batch`` of them. The next call overwrites them."""
        return TreeTensors(*(tensor[:batch] for tensor in _fields(self._out)))

    def top_log_probs(self, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely tokens of each position over the whole vocabulary, alike on all ranks.

        Args:
            drafted: ``[batch, depths, hidden]``.

        Returns:
            log-probabilities float32 and token ids int64, both ``[batch, depths, k]``, best first; equal ones by id.
        """
        shard = self._shard
        batch, depths, hidden = drafted.shape
        rows = drafted.reshape(-1, hidden).to(shard.weight.dtype)  # one product, not one a sequence
        logits = (rows @ shard.weight[: shard.tokens].T).view(batch, depths, -1)
        sharp = self._sharpness[:batch]
        log_probs, ids = self._kernels.top_log_probs(logits, self._k, sharp)
        if shard.group is None or self._ranks == 1:
            return log_probs, ids + shard.first_token if shard.first_token else ids
        return self._over_ranks(logits.float(), ids, sharp, shard.group)

    def _over_ranks(
        self, logits: torch.Tensor, ids: torch.Tensor, sharp: torch.Tensor, group: Group
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join every rank's best by one gather of ``[logits | ids | logsumexp of sharpened logits]``."""
        (batch, depths, k), rows = ids.shape, ids.shape[0] * ids.shape[1]
        mine, everyones = self._mine[:rows], self._everyones[: self._ranks * rows]
        mine[:, :k] = logits.gather(-1, ids).view(rows, k)
        mine[:, k : 2 * k] = (ids + self._shard.first_token).int().view(rows, k).view(torch.float32)
        mine[:, 2 * k] = (logits * sharp[:, None, None]).logsumexp(-1).view(rows)
        group.all_gather_into_tensor(everyones, mine)
        # [rows, ranks * k] in order of rank, hence of token id where logits are equal: a stable sort keeps that order.
        parts = everyones.view(self._ranks, rows, 2 * k + 1).transpose(0, 1)
        values = parts[..., :k].reshape(rows, -1)
        tokens = parts[..., k : 2 * k].contiguous().view(torch.int32).long().reshape(rows, -1)
        best = values.sort(dim=1, descending=True, stable=True)
        sharpened = best.values[:, :k] * sharp.repeat_interleave(depths)[:, None]
        log_probs = (sharpened - parts[..., 2 * k].logsumexp(1, keepdim=True)).clamp_max(0.0)
        return log_probs.view(batch, depths, k), tokens.gather(1, best.indices[:, :k]).view(batch, depths, k)


def _fields(tree: TreeTensors) -> tuple[torch.Tensor, ...]:
    return tree.tokens, tree.parents, tree.depths, tree.scores, tree.ancestors
