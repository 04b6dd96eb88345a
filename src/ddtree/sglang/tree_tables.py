"""What FlashAttention reads of trees in SGLang's verify graph: made in one launch instead of some twenty.

SGLang's backend attends twice and joins the results: to the cached tokens by one table of K/V slots a sequence, and to
a row's ancestors by one table a row. Before every replay it works the second out of the mask with a sort and a dozen
small operations, which cost the host more than the whole pass costs the GPU where the model is small. Here the trees
are at hand, so the tables are written from them.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ddtree.kernels.tree_tensors import TreeTensors

logger = logging.getLogger(__name__)

KNOWN_PARAMETERS = (
    "bs", "req_pool_indices", "seq_lens", "seq_lens_sum", "encoder_lens", "forward_mode", "spec_info", "seq_lens_cpu",
    "out_cache_loc",
)  # fmt: skip
"""Of ``FlashAttentionBackend._apply_cuda_graph_metadata``, 0.5.16 to 0.5.18."""


def write_tree_tables(slots: torch.Tensor, ancestors: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> None:
    """Write the K/V slots that each row sees of its tree, in ascending rows; those that it does not see follow them.

    Args:
        slots: int64 ``[batch, at least rows]``, of each sequence's rows.
        ancestors: bool ``[batch, rows, rows]`` as in `ddtree.kernels.tree_tensors.TreeTensors`.
        table: int32 ``[at least batch * rows, rows]``; rows behind the batch's stay as they are.
        lengths: int32 ``[at least batch * rows]``, slots that a row sees; 1 behind the batch's, which are padding.
    """
    batch, rows, _ = ancestors.shape
    order = (~ancestors).to(torch.uint8).sort(dim=-1, stable=True).indices
    own = slots[:, None, :rows].expand(batch, rows, rows).gather(2, order)
    table[: batch * rows] = own.view(-1, rows).int()
    lengths[: batch * rows] = ancestors.sum(-1).view(-1).int()
    lengths[batch * rows :] = 1


class TreeTables:
    """Stands in for the part of a backend that prepares a verify graph's replay; everything else goes through to it.

    Args:
        backend: SGLang's ``FlashAttentionBackend``, one that `why_not` has no word against.
        write: `write_tree_tables` or its fast twin.
    """

    def __init__(self, backend: Any, write: Callable[..., None]) -> None:
        self._backend, self._write = backend, write
        self._theirs = backend._apply_cuda_graph_metadata
        self._build_page_table = vars(sys.modules[type(backend).__module__])["build_trtllm_mha_page_table"]
        self._next: tuple[TreeTensors, torch.Tensor] | None = None
        self._has_warned = False
        backend._apply_cuda_graph_metadata = self._apply

    @contextmanager
    def of(self, tree: TreeTensors, slots: torch.Tensor) -> Iterator[None]:
        """The verify pass that is prepared within is of these trees, whose rows have these K/V slots."""
        self._next = tree, slots
        try:
            yield
        finally:
            self._next = None  # a pass without a graph asks for no tables

    def _apply(self, **given: Any) -> None:
        is_verify = given["forward_mode"].is_target_verify()
        if self._next is None or not is_verify:
            if is_verify and not self._has_warned:
                logger.warning("DDTREE: a verify pass came without its trees, SGLang reads them from the mask: slower")
                self._has_warned = True
            self._theirs(**given)
            return
        (tree, slots), self._next = self._next, None
        backend, size = self._backend, given["bs"]
        cached = backend.target_verify_metadata_topk_normal[size]
        cached.cache_seqlens_int32.copy_(given["seq_lens"][:size])
        cached.max_seq_len_k = backend.max_context_len
        torch.cumsum(cached.cache_seqlens_int32, 0, dtype=torch.int32, out=cached.cu_seqlens_k[1:])
        self._build_page_table(
            req_to_token=backend.req_to_token,
            req_pool_indices=given["req_pool_indices"][:size],
            cache_seqlens=cached.cache_seqlens_int32,
            page_table=cached.page_table,
            page_size=backend.page_size,
        )
        own = backend.target_verify_metadata_topk_expand[size]
        self._write(slots, tree.ancestors, own.page_table, own.cache_seqlens_int32)
        torch.cumsum(own.cache_seqlens_int32, 0, dtype=torch.int32, out=own.cu_seqlens_k[1:])
        backend.forward_metadata = cached
        backend.forward_metadata_spec_decode_expand = own


def why_not(backend: Any) -> str | None:
    """Why a backend keeps its own way; None where `TreeTables` can stand in."""
    if type(backend).__name__ != "FlashAttentionBackend":
        return f"{type(backend).__name__} is not FlashAttention's own backend"
    theirs = tuple(inspect.signature(backend._apply_cuda_graph_metadata).parameters)
    if theirs != KNOWN_PARAMETERS:
        return "this release prepares its graphs in another way"
    if backend.topk <= 1:
        return "chains need no tables"
    if getattr(backend, "has_swa", False):
        return "the model has sliding windows, which want tables of their own"
    return None
