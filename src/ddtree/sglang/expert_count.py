"""Distinct experts of a layer that the rows of a tree pick: what a budget costs a mixture of experts; off by default.

Rows of a tree stand best first, so the first ``n + 1`` rows are the tree of budget ``n``: one verify pass tells the
counts of every smaller budget. Counting happens on the device, inside SGLang's graph where there is one.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch

logger = logging.getLogger(__name__)

TELL_EVERY_PASSES = 200
BUDGETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ExpertCount:
    """Counts over the verify passes of single sequences; passes of several sequences at once are left out.

    Args:
        width: rows of a pass, the budget and one.
        ranks_an_expert: tensor-parallel ranks that share the weights of one expert.
        device: where the passes run.

    Attributes:
        is_paused: set while prompts are read, which are no verify passes.
    """

    def __init__(self, width: int, ranks_an_expert: int, device: torch.device) -> None:
        self._width, self._ranks = width, ranks_an_expert
        self._distinct = torch.zeros(width, dtype=torch.int64, device=device)
        self._routed = torch.zeros(1, dtype=torch.int64, device=device)
        self._layers, self._expert_bytes, self._passes = 0, 0, 0
        self.is_paused = False

    def attach(self, model: torch.nn.Module) -> None:
        """Watch every router of ``model``; call before graphs are captured.

        Raises:
            ValueError: the model has none.
        """
        for block in _mixtures(model):
            block.topk.register_forward_hook(self._watch)
            self._layers += 1
            shards = [getattr(block.experts, name, None) for name in ("w13_weight", "w2_weight")]
            self._expert_bytes = self._ranks * sum(shard[0].nbytes for shard in shards if shard is not None)
        if not self._layers:
            raise ValueError("DDTREE: count_experts is for mixtures of experts, this target has none: leave it out")

    def _watch(self, router: Any, inputs: Any, output: Any) -> None:
        ids = getattr(output, "topk_ids", None)
        if ids is None:
            raise ValueError(
                f"DDTREE: count_experts cannot see what a router chose ({type(output).__name__}): "
                "use --moe-runner-backend triton, or leave it out"
            )
        if ids.shape[0] != self._width or self.is_paused:
            return
        experts = output.router_logits.shape[-1]
        # Shared experts that are fused into the routed ones, and padding, fall into a column that is not counted.
        outside = (ids < 0) | (ids >= experts)
        picked = torch.zeros(self._width, experts + 1, dtype=torch.int64, device=ids.device)
        picked.scatter_(1, torch.where(outside, experts, ids).long(), 1)
        self._distinct.add_((picked[:, :experts].cumsum(0) > 0).sum(1))
        self._routed.add_(1)

    def after_round(self, batch: int) -> None:
        """Count a round of ``batch`` sequences, and print the table from time to time."""
        if self._passes == 0:  # what graph capture and its dummy passes counted is of no request
            self._distinct.zero_()
            self._routed.zero_()
        self._passes += 1
        if batch == 1 and self._passes % TELL_EVERY_PASSES == 0:
            logger.info("DDTREE: %s", self.table())

    def rows(self) -> list[tuple[int, float]]:
        """Mean of distinct experts a layer, by budget; empty where no pass of a single sequence was seen."""
        seen = int(self._routed)
        means = [total / seen for total in self._distinct.tolist()] if seen else []
        budgets = sorted({budget for budget in (*BUDGETS, self._width - 1) if budget < self._width})
        return [(budget, means[budget]) for budget in budgets] if means else []

    def table(self) -> str:
        """The rows in words, for the log."""
        rows = self.rows()
        if not rows:
            return "distinct experts: no verify pass of a single sequence was seen yet"
        passes = int(self._routed) / self._layers
        lines = [
            f"distinct experts by budget ({passes:.0f} passes of one sequence, {self._layers} layers)",
            "| budget | experts a layer | against budget 0 | expert weights read a pass, MB |",
            "| --- | --- | --- | --- |",
        ]
        for budget, experts in rows:
            megabytes = experts * self._layers * self._expert_bytes / 1e6
            lines.append(f"| {budget} | {experts:.1f} | {experts / rows[0][1]:.2f} | {megabytes:.1f} |")
        return "\n".join(lines)


def _mixtures(model: torch.nn.Module) -> Iterator[Any]:
    """Blocks of routed experts as SGLang builds them: a router ``topk`` beside ``experts``."""
    for module in model.modules():
        if isinstance(getattr(module, "topk", None), torch.nn.Module) and hasattr(module, "experts"):
            yield module
