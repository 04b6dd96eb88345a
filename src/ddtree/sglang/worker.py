"""The worker: one round of DDTree over SGLang's batch, without a word to the host on the way."""

import logging
from copy import deepcopy
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.sglang.draft_input import DDTreeDraftInput
from ddtree.sglang.head import HeadShard, TreeHead
from ddtree.sglang.kernel_choice import choose_kernels
from ddtree.sglang.round_start import RoundStart
from ddtree.sglang.sampling import choose_tokens
from ddtree.sglang.settings import TreeSettings
from ddtree.sglang.slot_mover import SlotMover
from ddtree.sglang.verify_mask import mask_elements
from ddtree.sglang.verify_tail import VerifyTail

logger = logging.getLogger(__name__)


class DDTreeWorker(DFlashWorkerV2):
    """SGLang's DFLASH worker, whose decode round drafts, verifies and walks a tree.

    Prefill and idle steps are SGLang's. The drafter runs with arguments of its own, in which the block is the width.
    """

    def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:
        self.settings = TreeSettings.from_environment()
        draft_args = deepcopy(server_args)
        draft_args.__dict__.pop("max_speculative_num_draft_tokens", None)  # cached from the target's width
        draft_args.override(
            "ddtree.draft",
            speculative_num_draft_tokens=self.settings.block_size,
            speculative_eagle_topk=1,
            speculative_num_steps=1,
        )
        super().__init__(draft_args, gpu_id, ps, nccl_port, target_worker)
        self.server_args = server_args
        self.speculative_num_draft_tokens = self.settings.width
        self.kernels = choose_kernels(torch.device(self.device))
        self._workspaces: list[Any] = []
        self._mask: torch.Tensor | None = None
        self._rounds = 0
        self._filters_in_turn = server_args.sampling_backend == "flashinfer"
        if ps.tp_rank == 0:
            logger.info("DDTREE worker: %s kernels=%s", self.settings.one_line(), self.kernels.name)

    # -- setting up ------------------------------------------------------------------------------------------------

    def init_attention_backends(self) -> None:
        """Also make what follows the passes and record it: SGLang captures the target's graphs right after this."""
        super().init_attention_backends()
        self._head = self._make_head()
        self._tail = VerifyTail(
            self.settings, self.kernels, self._head.trees, SlotMover(self.model_runner.token_to_kv_pool), self._inject,
            self._max_batch(), torch.device(self.device),
        )  # fmt: skip
        with torch.no_grad():
            self._warm()
        self.draft_model_runner.capture_tail_hooks.append(self._build_in_graph)
        if self.settings.fold_tail:
            self.model_runner.capture_tail_hooks.append(self._finish_in_graph)

    def _maybe_build_draft_sampler(self) -> None:
        """No greedy head: the tree head stands in its place."""

    def _make_head(self) -> TreeHead:
        lm_head = self.target_worker.model_runner.model.lm_head
        group = get_tp_group()
        weight = lm_head.weight
        if not torch.is_floating_point(weight) or weight.element_size() < 2:
            raise ValueError(
                f"DDTREE needs an LM head in 16 or 32 bits, this one is {weight.dtype}: keep it unquantised"
            )
        shard = getattr(lm_head, "shard_indices", None)
        if shard is None and group.world_size > 1:
            raise ValueError("DDTREE cannot tell which vocabulary a rank's LM head holds: run with --tp-size 1")
        if shard is not None and int(shard.num_added_elements):
            raise ValueError("DDTREE does not support an LM head with added vocabulary: run without adapters")
        return TreeHead(
            HeadShard(
                weight=weight,
                tokens=int(weight.shape[0] if shard is None else shard.num_org_elements),
                first_token=0 if shard is None else int(shard.org_vocab_start_index),
                group=group if group.world_size > 1 else None,
            ),
            self.settings,
            self._max_batch(),
            int(self.model_runner.model_config.context_len),
            self.kernels,
        )

    def _max_batch(self) -> int:
        graphs = self.server_args.cuda_graph_config.decode.bs or [1]
        requests = int(self.model_runner.max_running_requests), int(self.model_runner.req_to_token_pool.size)
        return max(*requests, *graphs)

    def _warm(self) -> None:
        """Compile and load every kernel of a round: a capture cannot, and the first request should not wait for it."""
        settings, device = self.settings, torch.device(self.device)
        weight = self.target_worker.model_runner.model.lm_head.weight
        one, table = torch.ones(1, dtype=torch.int64, device=device), self.model_runner.req_to_token_pool.req_to_token
        start = self.kernels.start_round(one, one, one * 0, table, settings.block_size, settings.slots, 0)
        hidden = torch.zeros(settings.block_size, weight.shape[1], dtype=weight.dtype, device=device)
        self._head(hidden, start.block_ids.view(-1), start.block_positions.view(-1))
        tree = self._head.trees(1)
        self.kernels.write_verify_mask(tree.ancestors, one, self._mask_buffer(mask_elements(settings.width, 8, 1)))
        logits = torch.zeros(1, settings.width, int(self.model_runner.model_config.vocab_size), device=device)
        chosen = self.kernels.choose(logits, None, tree, one)
        paths = self.kernels.walk_tree(tree, chosen, settings.depths)
        self.kernels.commit_paths(paths, one, start.slots, settings.width)

    def _build_in_graph(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        self._head(out.hidden_states, forward_batch.input_ids, forward_batch.positions)

    def _finish_in_graph(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        self._tail.record(out.next_token_logits, out.hidden_states, forward_batch.out_cache_loc, forward_batch.seq_lens)

    def _inject(self, taps: torch.Tensor, commit: Any) -> None:
        """Write the drafter's K/V of the committed tokens."""
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=taps,
            cache_loc=commit.target.view(-1),
            cache_loc_2d=commit.target,
            positions=commit.positions.view(-1),
            commit_lens=commit.lengths,
        )
        # SGLang's helper takes larger buffers when a longer prompt comes; those of a recorded graph must stay.
        if torch.cuda.is_current_stream_capturing() and self._fused_kv_helper is not None:
            self._workspaces.append({k: v for k, v in vars(self._fused_kv_helper).items() if k.endswith("_workspace")})

    def _make_next_draft_input_prefill(self, *, bonus_tokens: torch.Tensor, seq_lens: torch.Tensor) -> DDTreeDraftInput:
        return DDTreeDraftInput.begin(bonus_tokens, seq_lens, self.settings.reserve_tokens)

    def _make_next_draft_input_decode(
        self, *, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor
    ) -> DDTreeDraftInput:
        return DDTreeDraftInput.begin(bonus_tokens, new_seq_lens, self.settings.reserve_tokens)

    # -- a round ---------------------------------------------------------------------------------------------------

    def forward_batch_generation(self, batch: Any, on_publish: Any = None, **named: Any) -> Any:
        """One step of SGLang's scheduler."""
        prefill = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        if prefill or batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish, **named)
        with torch.no_grad():
            return self._decode(batch, on_publish)

    def _decode(self, batch: Any, on_publish: Any) -> Any:
        committed = batch.seq_lens
        committed.record_stream(torch.cuda.current_stream())  # it may come from the scheduler's stream
        size = len(committed)
        info = batch.sampling_info
        plain = info is None or (info.is_all_greedy and info.logit_bias is None)
        start = self._start(batch)
        tree = self._draft(batch, start)
        self._tail.switch(plain)
        seen, in_graph = self._verify(batch, start, tree)
        if plain and in_graph and self.settings.fold_tail:
            walked = self._tail.results(size)
            if on_publish is not None:
                on_publish(walked.committed)
        else:
            logits = seen.next_token_logits.view(size, self.settings.width, -1)
            chosen = self._choose(batch, logits, tree, committed)
            walked = self._tail.run(chosen, seen.hidden_states, start.slots, committed, on_publish)
        self._rounds += 1
        seen.hidden_states = None  # large, and of no use to the host
        return GenerationBatchResult(
            logits_output=seen,
            next_token_ids=walked.tokens.view(-1),
            accept_lens=walked.lengths,
            can_run_cuda_graph=in_graph,
            next_draft_input=DDTreeDraftInput.begin(walked.roots, walked.committed, self.settings.reserve_tokens),
            speculative_num_draft_tokens=self.settings.depths + 1,  # tokens a sequence in next_token_ids
            new_seq_lens=walked.committed,
        )

    def _start(self, batch: Any) -> RoundStart:
        start: RoundStart = self.kernels.start_round(
            batch.spec_info.bonus_tokens.view(-1),
            batch.seq_lens,
            batch.req_pool_indices,
            self.model_runner.req_to_token_pool.req_to_token,
            self.settings.block_size,
            self.settings.slots,
            int(self._mask_token_id),
        )
        return start

    def _draft(self, batch: Any, start: RoundStart) -> TreeTensors:
        """Run the drafter over the block and build the trees."""
        size, block = start.block_ids.shape
        slots = start.slots[:, :block].contiguous()
        embedding = self.target_worker.model_runner.model.get_input_embeddings()
        lengths, lengths_cpu, length_sum = self._draft_lengths(batch, slots)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=size,
            input_ids=start.block_ids.view(-1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=lengths,
            out_cache_loc=slots.view(-1),
            seq_lens_sum=length_sum,
            seq_lens_cpu=lengths_cpu,
            positions=start.block_positions.view(-1),
            input_embeds=embedding(start.block_ids.view(-1)),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        out = self.draft_model_runner.forward(forward_batch)
        if not out.can_run_graph:
            self._head(out.logits_output.hidden_states, start.block_ids.view(-1), start.block_positions.view(-1))
        return self._head.trees(size)

    def _draft_lengths(self, batch: Any, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Context that the drafter sees: lengths on the device, a bound of them on the host, and the bound's sum."""
        size, block = slots.shape
        state = batch.spec_info
        bound = torch.empty(size, dtype=torch.int32)
        if self.use_compact_draft_cache:
            lengths = self._compute_compact_draft_seq_lens(batch.seq_lens)
            self._fill_compact_seq_lens_cpu_bound(
                batch_seq_lens_cpu=batch.seq_lens_cpu,
                reserved_seq_lens_cpu=state.reserved_seq_lens_cpu,
                draft_prefix_lens=lengths,
                out=bound,
            )
            self._rebuild_compact_draft_cache(
                req_pool_indices=batch.req_pool_indices,
                prefix_lens=batch.seq_lens,
                draft_prefix_lens=lengths,
                verify_out_cache_loc_2d=slots,
                bs=size,
                block_size=block,
            )
            return lengths, bound, int(bound.sum())
        bound.copy_(self._host_bound(batch, block))
        return batch.seq_lens, bound, int(bound.sum())

    def _host_bound(self, batch: Any, rows: int) -> torch.Tensor:
        """What the host knows of the lengths when ``rows`` more are attended to; never too low."""
        if batch.seq_lens_cpu is not None:
            return batch.seq_lens_cpu + rows
        if batch.spec_info.reserved_seq_lens_cpu is not None:
            return batch.spec_info.reserved_seq_lens_cpu
        return batch.seq_lens.cpu() + rows

    def _verify(self, batch: Any, start: RoundStart, tree: TreeTensors) -> tuple[Any, bool]:
        """Run the target over root and nodes: SGLang's output of every row, and whether by graph."""
        width = self.settings.width
        bound = self._host_bound(batch, width)
        verify_input = DFlashVerifyInput(
            draft_token=tree.tokens.reshape(-1),
            positions=(batch.seq_lens[:, None] + tree.depths).view(-1),
            draft_token_num=width,
            custom_mask=None if self.settings.is_chain else self._verify_mask(tree, batch.seq_lens, int(bound.sum())),
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        batch.out_cache_loc = start.slots[:, :width].reshape(-1)
        kept = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu, batch.seq_lens_sum = bound, int(bound.sum())
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = kept
        out = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        if out.logits_output.hidden_states is None:
            raise RuntimeError("the target's verify pass returned no taps")
        return out.logits_output, bool(out.can_run_cuda_graph)

    def _verify_mask(self, tree: TreeTensors, committed: torch.Tensor, committed_bound: int) -> torch.Tensor:
        """The mask as SGLang's backends read it: a view, long enough whatever the lengths on the device."""
        size, width = tree.tokens.shape
        needed = mask_elements(width, committed_bound, size)
        mask = self._mask_buffer(needed)
        # A backend copies the view into a buffer of its own, which is no longer than its context allows.
        own = getattr(self.model_runner.attn_backend, "cuda_graph_custom_mask", None)
        self.kernels.write_verify_mask(tree.ancestors, committed, mask)
        return mask[: needed if own is None else min(needed, own.numel())]

    def _mask_buffer(self, elements: int) -> torch.Tensor:
        if self._mask is None or self._mask.numel() < elements:
            self._mask = torch.ones(max(2 * elements, 1 << 20), dtype=torch.bool, device=self.device)
        return self._mask

    def _choose(self, batch: Any, logits: torch.Tensor, tree: TreeTensors, committed: torch.Tensor) -> torch.Tensor:
        info = batch.sampling_info
        sampled = info is not None and not info.is_all_greedy
        chosen = choose_tokens(
            logits, info, tree, committed,
            round_seed=(int(self.server_args.random_seed) * 0x9E3779B97F4A7C15 + self._rounds) % 2**64,
            kernels=self.kernels,
            sequential_filters=self._filters_in_turn and sampled and info.need_min_p_sampling,
        )  # fmt: skip
        group = get_tp_group()
        if sampled and group.world_size > 1:
            group.broadcast(chosen, src=0)
        return chosen
