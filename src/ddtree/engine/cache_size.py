"""How large the cache of an engine is."""

from dataclasses import dataclass

from ddtree.engine.device import free_memory_bytes
from ddtree.engine.speculation import MAX_BUDGET
from ddtree.errors import UserError
from ddtree.models.drafter import Drafter
from ddtree.models.target import Target

PAGE_TOKENS = 16
"""Tokens that a page holds."""


@dataclass(frozen=True)
class CacheSize:
    """Size of a cache in pages of `PAGE_TOKENS` tokens.

    Attributes:
        n_pages: all pages, the trash page included.
        table_pages: pages that one sequence can own.
    """

    n_pages: int
    table_pages: int


def choose_cache_size(
    target: Target,
    drafter: Drafter | None,
    *,
    max_model_len: int,
    max_batch: int,
    prefill_tokens: int,
    memory_fraction: float,
) -> CacheSize:
    """Room for ``max_batch`` sequences of full length, or for what the memory holds that is free now.

    Args:
        prefill_tokens: prompt tokens that a sequence commits at once.
        memory_fraction: share of the free memory that may be taken.

    Raises:
        UserError: not even one sequence of full length fits.
    """
    widest = max_model_len + max(MAX_BUDGET + 1, 2 * prefill_tokens)  # a round's rows, or a filled-up chunk
    table_pages = -(-widest // PAGE_TOKENS)
    token_bytes = _bytes_per_token(target, drafter)
    affordable = int(free_memory_bytes(target.device) * memory_fraction) // (token_bytes * PAGE_TOKENS)
    n_pages = min(affordable, max_batch * table_pages + 1)
    if (n_pages - 1) * PAGE_TOKENS < max_model_len:
        raise UserError(
            f"a cache of {max_model_len} tokens needs {max_model_len * token_bytes / 2**30:.1f} GiB, "
            f"{affordable * token_bytes * PAGE_TOKENS / 2**30:.1f} GiB may be used",
            "lower max_model_len, or raise the memory fraction",
        )
    return CacheSize(n_pages, table_pages)


def _bytes_per_token(target: Target, drafter: Drafter | None) -> int:
    values = target.config.n_layers * target.config.layer.kv_size
    if drafter is not None:
        values += drafter.config.n_layers * drafter.config.layer.kv_size
    return values * target.dtype.itemsize
