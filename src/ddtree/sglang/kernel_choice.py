"""The kernels that a worker runs with: fast ones on a GPU that can, else their slow twins."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ddtree.kernels.fast_set import FAST, why_not_fast
from ddtree.kernels.kernel_set import TWINS


@dataclass(frozen=True)
class WorkerKernels:
    """One implementation of each kernel of a round; `name` tells which."""

    name: str
    top_log_probs: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    build_tree: Callable[..., Any]
    choose: Callable[..., torch.Tensor]
    walk_tree: Callable[..., Any]
    start_round: Callable[..., Any]
    write_verify_mask: Callable[..., None]
    write_tree_tables: Callable[..., None]
    commit_paths: Callable[..., Any]


def choose_kernels(device: torch.device) -> WorkerKernels:
    """The fast set for ``device`` where it runs there, else the twins."""
    if why_not_fast(device) is None:
        from ddtree.sglang.commit_triton import commit_paths
        from ddtree.sglang.round_start_triton import start_round
        from ddtree.sglang.tree_tables_triton import write_tree_tables
        from ddtree.sglang.verify_mask_triton import write_verify_mask

        base = FAST
    else:
        from ddtree.sglang.commit import commit_paths
        from ddtree.sglang.round_start import start_round
        from ddtree.sglang.tree_tables import write_tree_tables
        from ddtree.sglang.verify_mask import write_verify_mask

        base = TWINS
    return WorkerKernels(
        base.name, base.top_log_probs, base.build_tree, base.choose, base.walk_tree,
        start_round, write_verify_mask, write_tree_tables, commit_paths,
    )  # fmt: skip
