"""The speculative algorithm as SGLang sees it: of its DFLASH family, with a verify pass of a width of its own."""

import logging
from typing import Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from ddtree.sglang.resolution import resolve_server_args
from ddtree.sglang.settings import TreeSettings

logger = logging.getLogger(__name__)


class DDTreeAlgorithm(CustomSpecAlgo):
    """Answers SGLang's questions about DDTREE, some of which its own base class for plugins cannot answer."""

    is_ddtree_plugin = True

    def is_dflash_family(self) -> bool:
        """Taps of target layers, the drafter's K/V in the target's slots, requests checked as for DFLASH."""
        return True

    def supports_target_verify_for_draft(self) -> bool:
        """The drafter runs its block in verify mode, in a graph of its own width."""
        return True

    def has_draft_kv(self) -> bool:
        """False: slots are counted by rows of the verify pass, not by EAGLE's chains of pages."""
        return False

    def need_topk(self) -> bool:
        """Nothing but the root is relayed between rounds."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """No hidden states are relayed: taps are injected within the round."""
        return False

    def supports_grammar_overlap(self) -> bool:
        """The worker brings grammars up to date itself, while the target verifies (SGLang 0.5.17 and later)."""
        return True

    def create_future_map(self, device: Any, req_to_token_pool: Any, *args: Any, **kwargs: Any) -> Any:
        """SGLang's relay between rounds, as its own algorithms make it."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, *args, **kwargs)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Rows a sequence: the tree's width for the target, the block for the drafter."""
        return TreeSettings.from_environment().block_size if is_draft_worker else num_draft_tokens

    def handle_server_args(self, server_args: Any) -> None:
        """Resolve and check; SGLang calls this once, while it resolves its arguments."""
        resolve_server_args(server_args)


def worker_class(server_args: Any) -> type:
    """The worker that SGLang's scheduler makes."""
    from ddtree.sglang.worker import DDTreeWorker

    return DDTreeWorker
