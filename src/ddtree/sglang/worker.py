"""The worker: one round of DDTree over SGLang's batch, without a word to the host on the way."""

import logging
from contextlib import nullcontext
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from ddtree.kernels.tree_tensors import TreeTensors
from ddtree.sglang.draft_input import DDTreeDraftInput
from ddtree.sglang.draft_pass import DraftPass, host_bound
from ddtree.sglang.draft_scope import DraftScope
from ddtree.sglang.expert_count import ExpertCount
from ddtree.sglang.grammar import GrammarRound
from ddtree.sglang.head import TreeHead, head_shard
from ddtree.sglang.kernel_choice import choose_kernels
from ddtree.sglang.rank_check import RankCheck
from ddtree.sglang.resolution import resolved_view
from ddtree.sglang.round_start import RoundStart
from ddtree.sglang.sampling import choose_tokens
from ddtree.sglang.settings import TreeSettings
from ddtree.sglang.slot_mover import SlotMover
from ddtree.sglang.tree_tables import TreeTables, why_not
from ddtree.sglang.verify_mask import MaskBuffer
from ddtree.sglang.verify_tail import VerifyTail

logger = logging.getLogger(__name__)


class DDTreeWorker(DFlashWorkerV2):
    """SGLang's DFLASH worker, whose decode round drafts, verifies and walks a tree.

    Prefill and idle steps are SGLang's. The drafter runs with arguments of its own, in which the block is the width.
    """

    def __init__(self, **given: Any) -> None:
        """Made by SGLang's scheduler, by names that differ between its releases."""
        self.settings = TreeSettings.from_environment()
        server_args = given["server_args"]
        scope = DraftScope(server_args, self.settings.block_size)
        with scope():
            super().__init__(**given | {"server_args": scope.arguments})
        self.server_args = server_args
        self._resolved = resolved_view(server_args)
        self.speculative_num_draft_tokens = self.settings.width
        self.kernels = choose_kernels(torch.device(self.device))
        self._draft_pass = DraftPass(self, scope)
        self._workspaces: list[Any] = []
        self._mask = MaskBuffer(self.kernels.write_verify_mask, torch.device(self.device))
        self._rounds = 0
        self._filters_in_turn = self._resolved.sampling_backend == "flashinfer"
        self._is_first_rank = get_tp_group().rank_in_group == 0
        self._rank_check: RankCheck | None = None
        self._expert_count: ExpertCount | None = None
        if self._is_first_rank:
            logger.info("DDTREE worker: %s kernels=%s", self.settings.one_line(), self.kernels.name)

    # -- setting up ------------------------------------------------------------------------------------------------

    def alloc_memory_pool(self, *args: Any, **named: Any) -> None:
        """The drafter's own pool."""
        with self._draft_pass.scope():
            super().alloc_memory_pool(*args, **named)

    def init_cuda_graphs(self) -> None:
        """The drafter's own graphs."""
        with self._draft_pass.scope():
            super().init_cuda_graphs()

    def prewarm_sampling(self) -> Any:
        """Rehearse plain sampling: SGLang's rehearsal for DFLASH is of chains (0.5.23)."""
        return self.model_runner.prewarm_sampling()

    def _defer_target_verify_gather(self) -> None:
        """Never: what follows a verify pass wants whole logits (0.5.23)."""

    def init_attention_backends(self) -> None:
        """Also make what follows the passes and record it: SGLang captures the target's graphs right after this."""
        with self._draft_pass.scope():
            super().init_attention_backends()
        self._head = self._make_head()
        self._tail = VerifyTail(
            self.settings, self.kernels, self._head.trees, SlotMover(self.model_runner.token_to_kv_pool), self._inject,
            self._max_batch(), torch.device(self.device),
        )  # fmt: skip
        self._tables = self._make_tables()
        self._watch()
        with torch.no_grad():
            self._warm()
        self.draft_model_runner.capture_tail_hooks.append(self._build_in_graph)
        if self.settings.fold_tail:
            self.model_runner.capture_tail_hooks.append(self._finish_in_graph)

    def _maybe_build_draft_sampler(self) -> None:
        """No greedy head: the tree head stands in its place."""

    def _make_head(self) -> TreeHead:
        return TreeHead(
            head_shard(self.target_worker.model_runner.model.lm_head, get_tp_group()),
            self.settings,
            self._max_batch(),
            int(self.model_runner.model_config.context_len),
            self.kernels,
        )

    def _make_tables(self) -> TreeTables | None:
        backend = self.model_runner.attn_backend
        if self._resolved.disable_cuda_graph:
            reason: str | None = "no graphs"
        else:
            reason = why_not(backend) if self.settings.own_tables else "switched off"
        if self._is_first_rank:
            logger.info("DDTREE worker: trees reach attention by %s", f"the mask: {reason}" if reason else "own tables")
        return None if reason else TreeTables(backend, self.kernels.write_tree_tables)

    def _watch(self) -> None:
        """What is looked at beside the work, where that was asked for."""
        group = get_tp_group()
        if self.settings.check_ranks and group.world_size > 1:
            self._rank_check = RankCheck(group, self._is_first_rank)
        if self.settings.count_experts and self._is_first_rank:
            shared_by = group.world_size // int(self._resolved.ep_size)
            self._expert_count = ExpertCount(self.settings.width, shared_by, torch.device(self.device))
            self._expert_count.attach(self.model_runner.model)

    def _max_batch(self) -> int:
        graphs = self._resolved.cuda_graph_config.decode.bs or [1]
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
        self._mask.of(tree, one, 1, None)
        if self._tables is not None:
            lengths = torch.zeros(settings.width, dtype=torch.int32, device=device)
            self.kernels.write_tree_tables(start.slots, tree.ancestors, lengths.repeat(settings.width, 1), lengths)
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
        if self._expert_count is not None:
            self._expert_count.is_paused = prefill
        if prefill or batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish, **named)
        with torch.no_grad():
            return self._decode(batch, on_publish, named.get("grammar_barrier"))

    def _decode(self, batch: Any, on_publish: Any, grammar_barrier: Any) -> Any:
        committed = batch.seq_lens
        committed.record_stream(torch.cuda.current_stream())  # it may come from the scheduler's stream
        size = len(committed)
        info = batch.sampling_info
        has_grammar = bool(getattr(batch, "has_grammar", False))
        plain = info is None or (info.is_all_greedy and info.logit_bias is None and not has_grammar)
        start = self._start(batch)
        tree = self._draft(batch, start)
        if self._rank_check is not None:
            self._rank_check(tree)
        self._tail.switch(plain)
        grammar = GrammarRound(batch, tree) if has_grammar else None
        seen, in_graph = self._verify(batch, start, tree)
        if grammar is not None:
            grammar.mask(seen.next_token_logits, grammar_barrier)
        if plain and in_graph and self.settings.fold_tail:
            walked = self._tail.results(size)
            if on_publish is not None:
                on_publish(walked.committed)
        else:
            logits = seen.next_token_logits.view(size, self.settings.width, -1)
            chosen = self._choose(batch, logits, tree, committed)
            walked = self._tail.run(chosen, seen.hidden_states, start.slots, committed, on_publish)
        self._rounds += 1
        if self._expert_count is not None:
            self._expert_count.after_round(size)
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
        self._head.take_temperatures(batch.sampling_info, len(start.block_ids))
        out = self._draft_pass(batch, start)
        if not out.can_run_graph:
            self._head(out.logits_output.hidden_states, start.block_ids.view(-1), start.block_positions.view(-1))
        return self._head.trees(len(start.block_ids))

    def _verify(self, batch: Any, start: RoundStart, tree: TreeTensors) -> tuple[Any, bool]:
        """Run the target over root and nodes: SGLang's output of every row, and whether by graph."""
        width = self.settings.width
        bound = host_bound(batch, width)
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
        with nullcontext() if self._tables is None else self._tables.of(tree, start.slots):
            forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = kept
        out = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        if out.logits_output.hidden_states is None:
            raise RuntimeError("the target's verify pass returned no taps")
        return out.logits_output, bool(out.can_run_cuda_graph)

    def _verify_mask(self, tree: TreeTensors, committed: torch.Tensor, committed_bound: int) -> torch.Tensor:
        """A view that fits into the buffer to which a backend copies it, which is as long as its context allows."""
        backend = self.model_runner.attn_backend
        own = getattr(backend, "cuda_graph_custom_mask", None)
        if (kept := getattr(backend, "_verify_mask", None)) is not None:  # its name since 0.5.17
            own = kept.buffer if kept.is_read else None
        return self._mask.of(tree, committed, committed_bound, None if own is None else own.numel())

    def _choose(self, batch: Any, logits: torch.Tensor, tree: TreeTensors, committed: torch.Tensor) -> torch.Tensor:
        info = batch.sampling_info
        sampled = info is not None and not info.is_all_greedy
        chosen = choose_tokens(
            logits, info, tree, committed,
            round_seed=(int(self._resolved.random_seed) * 0x9E3779B97F4A7C15 + self._rounds) % 2**64,
            kernels=self.kernels,
            sequential_filters=self._filters_in_turn and sampled and info.need_min_p_sampling,
        )  # fmt: skip
        group = get_tp_group()
        if sampled and group.world_size > 1:
            group.broadcast(chosen, src=0)
        return chosen
