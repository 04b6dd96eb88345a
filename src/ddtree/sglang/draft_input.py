"""What a running batch carries from round to round, and the K/V slots that it holds ahead."""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

RESERVED = "nxt_kv_lens" if hasattr(DFlashDraftInputV2, "nxt_kv_lens_cpu") else "reserved_seq_lens"
"""What SGLang calls the lengths up to which slots are held: another name since 0.5.23."""


@dataclass
class DDTreeDraftInput(DFlashDraftInputV2):
    """SGLang's DFLASH state, with slots for a tree and for a block instead of twice a block.

    Attributes:
        reserve_tokens: `ddtree.sglang.settings.TreeSettings.reserve_tokens`.
    """

    reserve_tokens: int = 0

    @classmethod
    def begin(cls, roots: torch.Tensor, committed: torch.Tensor, reserve_tokens: int) -> "DDTreeDraftInput":
        """State before a round.

        Args:
            roots: ``[batch]``, tokens at the positions ``committed``.
            committed: ``[batch]``, cached tokens.
        """
        batch, device = committed.numel(), roots.device
        return cls(
            topk_p=torch.empty((batch, 0), device=device),
            topk_index=torch.empty((batch, 0), device=device, dtype=torch.int64),
            bonus_tokens=roots.to(torch.int64),
            new_seq_lens=committed.to(torch.int64),
            hidden_states=torch.empty((batch, 0), device=device, dtype=torch.float16),
            reserve_tokens=reserve_tokens,
        )

    def prepare_for_decode(self, batch: Any) -> None:
        """Hold slots for the next round of every request of ``batch``; the table's end is never passed."""
        if batch.batch_size() == 0:
            return
        page = batch.token_to_kv_pool_allocator.page_size
        table_width = batch.req_to_token_pool.req_to_token.shape[1]
        committed = [committed_length(request) for request in batch.reqs]
        held = [int(request.kv.kv_allocated_len) for request in batch.reqs]
        wanted = [
            max(have, min(-(-(length + self.reserve_tokens) // page) * page, table_width))
            for length, have in zip(committed, held, strict=True)
        ]
        held_cpu = torch.tensor(held, dtype=torch.int32)
        wanted_cpu = torch.tensor(wanted, dtype=torch.int32)
        alloc_for_spec_decode(
            batch.tree_cache,
            batch.req_to_token_pool,
            reqs=batch.reqs,
            req_pool_indices=batch.req_pool_indices,
            cur_kv_lens=held_cpu.to(batch.device, non_blocking=True),
            cur_kv_lens_cpu=held_cpu,
            nxt_kv_lens=wanted_cpu.to(batch.device, non_blocking=True),
            nxt_kv_lens_cpu=wanted_cpu,
            num_needed_tokens=sum(wanted) - sum(held),
            batch=batch,
        )
        # What the host knows lags a round behind; overlap scheduling puts the published lengths in its place.
        batch.seq_lens_cpu = torch.tensor(committed, dtype=torch.int64)
        batch.seq_lens_sum = sum(committed)
        setattr(self, f"{RESERVED}_cpu", wanted_cpu)
        setattr(self, f"{RESERVED}_sum", sum(wanted))

    @property
    def reserved(self) -> torch.Tensor | None:
        """int32 on the host ``[batch]``: lengths up to which slots are held; None before the first round."""
        held: torch.Tensor | None = getattr(self, f"{RESERVED}_cpu")
        return held


def committed_length(request: Any) -> int:
    """Tokens of a request whose K/V stays."""
    holder = request if hasattr(request, "kv_committed_len") else request.kv  # there since 0.5.23
    return int(holder.kv_committed_len)


def reserved_lengths(state: DDTreeDraftInput, draft_lengths: torch.Tensor) -> dict[str, Any]:
    """The arguments by which SGLang's window helper learns of the lengths that are held."""
    if RESERVED == "nxt_kv_lens":
        return {"nxt_kv_lens_cpu": state.reserved}
    return {"reserved_seq_lens_cpu": state.reserved, "draft_prefix_lens": draft_lengths}
