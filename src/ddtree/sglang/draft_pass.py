"""The drafter's pass over the block of every sequence, in SGLang's draft runner."""

import contextlib
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from ddtree.sglang.draft_input import reserved_lengths
from ddtree.sglang.draft_scope import DraftScope
from ddtree.sglang.round_start import RoundStart


class DraftPass:
    """Runs the drafter for a worker.

    Args:
        worker: SGLang's DFLASH worker, whose runner, window and buffers are used.
        scope: the drafter's settings.
    """

    def __init__(self, worker: Any, scope: DraftScope) -> None:
        self._worker, self._scope = worker, scope
        self._runner = worker.draft_model_runner
        self._embedding_scale = float(getattr(worker, "_noise_embed_scale", 1.0))
        self._translator = getattr(self._runner, "kv_index_translator", None)  # 0.5.23
        for head in ("selector", "lilicorr"):
            if getattr(worker, head, None) is not None:
                raise ValueError(f"DDTREE does not support a drafter with a {head} head: use one of plain DFlash")
        if getattr(worker, "_is_domino", False):
            raise ValueError("DDTREE does not support a drafter of Domino's kind: use one of plain DFlash")

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """What the drafter is made and run within."""
        stack = contextlib.ExitStack()
        stack.enter_context(self._scope())
        layout = getattr(self._worker, "draft_parallel_layout", None)
        if layout is not None:
            from sglang.srt.speculative.spec_utils import draft_tp_context

            stack.enter_context(draft_tp_context(layout))
        return stack

    def __call__(self, batch: Any, start: RoundStart) -> Any:
        """One pass.

        Args:
            batch: SGLang's, of the round.
            start: its blocks and K/V slots.

        Returns:
            SGLang's output of the runner.
        """
        size, block = start.block_ids.shape
        slots = start.slots[:, :block].contiguous()
        embedding = self._worker.target_worker.model_runner.model.get_input_embeddings()
        embedded = embedding(start.block_ids.view(-1))
        lengths, bound = self._lengths(batch, slots)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=size,
            input_ids=start.block_ids.view(-1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=lengths,
            out_cache_loc=slots.view(-1),
            seq_lens_sum=int(bound.sum()),
            seq_lens_cpu=bound,
            positions=start.block_positions.view(-1),
            input_embeds=embedded if self._embedding_scale == 1.0 else embedded * self._embedding_scale,
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._worker._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with self.scope():
            if self._translator is not None:
                forward_batch.can_run_decode_cuda_graph = batch.can_run_decode_cuda_graph
                self._translator.own_plan(forward_batch).bind(forward_batch, self._translator)
            return self._runner.forward(forward_batch)

    def _lengths(self, batch: Any, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Context that the drafter sees: lengths on the device, and a bound of them on the host."""
        size, block = slots.shape
        worker, bound = self._worker, torch.empty(len(slots), dtype=torch.int32)
        if not worker.use_compact_draft_cache:
            bound.copy_(host_bound(batch, block))
            return batch.seq_lens, bound
        lengths = worker._compute_compact_draft_seq_lens(batch.seq_lens)
        worker._fill_compact_seq_lens_cpu_bound(
            batch_seq_lens_cpu=batch.seq_lens_cpu, out=bound, **reserved_lengths(batch.spec_info, lengths)
        )
        worker._rebuild_compact_draft_cache(
            req_pool_indices=batch.req_pool_indices,
            prefix_lens=batch.seq_lens,
            draft_prefix_lens=lengths,
            verify_out_cache_loc_2d=slots,
            bs=size,
            block_size=block,
        )
        return lengths, bound


def host_bound(batch: Any, rows: int) -> torch.Tensor:
    """What the host knows of the lengths when ``rows`` more are attended to; never too low."""
    if batch.seq_lens_cpu is not None:
        known: torch.Tensor = batch.seq_lens_cpu + rows
        return known
    if batch.spec_info.reserved is not None:
        held: torch.Tensor = batch.spec_info.reserved
        return held
    read: torch.Tensor = batch.seq_lens.cpu() + rows
    return read
