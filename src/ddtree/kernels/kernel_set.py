"""The kernels that an engine runs with, chosen once for its device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from ddtree.kernels.activation import silu_mul
from ddtree.kernels.advance import Moves, advance, hand_over, keep_taps
from ddtree.kernels.choose import choose
from ddtree.kernels.embedding import embed_rows
from ddtree.kernels.forecast import forecast
from ddtree.kernels.layer_products import add_linear, attend_input, feed_forward_input
from ddtree.kernels.norm import add_rms_norm, rms_norm
from ddtree.kernels.paged import move_rows
from ddtree.kernels.placement import Placement, place_rows
from ddtree.kernels.rotary import rotate_and_write, write_context
from ddtree.kernels.seats import Seats, take_seats
from ddtree.kernels.top_log_probs import top_log_probs
from ddtree.kernels.tree_attention import TreeAttention
from ddtree.kernels.tree_build import build_tree
from ddtree.kernels.tree_walk import walk_tree


@dataclass(frozen=True)
class KernelSet:
    """One implementation of each kernel; all sets compute the same functions.

    Attributes:
        is_exact: what becomes of a row depends on that row, its keys and the weights alone, to the last bit.
    """

    name: str
    linear: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotate_and_write: Callable[..., torch.Tensor]
    silu_mul: Callable[..., torch.Tensor]
    attend_input: Callable[..., torch.Tensor]
    feed_forward_input: Callable[..., torch.Tensor]
    add_linear: Callable[..., torch.Tensor | None]
    write_context: Callable[..., None]
    tree_attention: Callable[..., Any]
    top_log_probs: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    build_tree: Callable[..., Any]
    choose: Callable[..., torch.Tensor]
    walk_tree: Callable[..., Any]
    move_rows: Callable[..., None]
    place_rows: Callable[..., Placement]
    advance: Callable[..., Moves]
    keep_taps: Callable[..., None]
    hand_over: Callable[[torch.Tensor, torch.Tensor], None]
    forecast: Callable[..., torch.Tensor]
    take_seats: Callable[..., Seats]
    embed_rows: Callable[..., torch.Tensor]
    is_exact: bool = False


TWINS = KernelSet(
    name="torch",
    linear=linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rotate_and_write=rotate_and_write,
    silu_mul=silu_mul,
    attend_input=attend_input,
    feed_forward_input=feed_forward_input,
    add_linear=add_linear,
    write_context=write_context,
    tree_attention=TreeAttention,
    top_log_probs=top_log_probs,
    build_tree=build_tree,
    choose=choose,
    walk_tree=walk_tree,
    move_rows=move_rows,
    place_rows=place_rows,
    advance=advance,
    keep_taps=keep_taps,
    hand_over=hand_over,
    forecast=forecast,
    take_seats=take_seats,
    embed_rows=embed_rows,
)
