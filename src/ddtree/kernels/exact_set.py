"""The target's kernels in exact mode: beside the fast set and beside its twins.

Only what the target computes has to be exact: drafts decide which continuations are looked at, not what is chosen.
"""

from dataclasses import replace

from ddtree.kernels import exact_rows
from ddtree.kernels.exact_attention import TreeAttention
from ddtree.kernels.fast_set import FAST, lazy
from ddtree.kernels.kernel_set import TWINS, KernelSet

EXACT = replace(
    FAST,
    name="fast, exact target",
    is_exact=True,
    linear=lazy("exact_products_triton", "linear"),
    attend_input=lazy("exact_products_triton", "attend_input"),
    feed_forward_input=lazy("exact_products_triton", "feed_forward_input"),
    add_linear=lazy("exact_products_triton", "add_linear"),
    tree_attention=lazy("exact_attention_triton", "TreeAttention"),
    choose=lazy("exact_choose_cuda", "choose"),
)

EXACT_TWINS = replace(
    TWINS,
    name="torch, exact target",
    is_exact=True,
    linear=exact_rows.linear,
    rms_norm=exact_rows.rms_norm,
    attend_input=exact_rows.attend_input,
    feed_forward_input=exact_rows.feed_forward_input,
    add_linear=exact_rows.add_linear,
    tree_attention=TreeAttention,
    choose=exact_rows.choose,
    place_rows=exact_rows.place_rows,
)


def cost_of(kernels: KernelSet) -> str | None:
    """What exactness costs; None where nothing is exact."""
    if not kernels.is_exact:
        return None
    if kernels is EXACT_TWINS:
        return "the target runs one row at a time: a round of n nodes takes n + 1 steps"
    return "products of one fixed tile and attention by position in place of the fastest kernels"


def exact_set(kernels: KernelSet) -> KernelSet:
    """The exact set that runs where ``kernels`` do."""
    return EXACT_TWINS if kernels is TWINS else EXACT
