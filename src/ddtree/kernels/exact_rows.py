"""Kernels of exact mode, one row at a time (slow twins).

A product over many rows adds up otherwise than one over a single row, even on the CPU, and where vectors end, so do
exponentials and sines. Here every row of every sequence is run alone, in memory of its own, exactly as plain decoding
of one sequence runs it: so its result is a function of that row and of the weights.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ddtree.kernels import choose as choose_twin
from ddtree.kernels import layer_products, norm, placement
from ddtree.kernels.choose import SamplingTensors
from ddtree.kernels.placement import Placement
from ddtree.kernels.tree_tensors import TreeTensors, root_only


def _rows(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Each row ``[1, 1, ...]`` of tensors ``[batch, rows, ...]``."""
    for sequence in range(tensors[0].shape[0]):
        for row in range(tensors[0].shape[1]):
            yield [tensor[sequence : sequence + 1, row : row + 1].clone() for tensor in tensors]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ddtree.kernels.norm.rms_norm`."""
    rows = x.reshape(1, -1, x.shape[-1])
    return torch.cat([norm.rms_norm(row, weight, eps) for (row,) in _rows(rows)], dim=1).view(x.shape)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``[..., size]`` times ``[columns, size]`` transposed, plus ``[columns]``."""
    rows = x.reshape(1, -1, x.shape[-1])
    products = [torch.nn.functional.linear(row[0], weight, bias) for (row,) in _rows(rows)]
    return torch.cat(products).view(*x.shape[:-1], -1)


def attend_input(
    stream: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    head_dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    normed: None = None,
) -> torch.Tensor:
    """See `ddtree.kernels.layer_products.attend_input`."""
    queries = [
        layer_products.attend_input(
            row, norm, eps, weight, bias, head_dim, q_norm, k_norm, row_cos, row_sin, cache, slot
        )
        for row, row_cos, row_sin, slot in _rows(stream, cos, sin, slots)
    ]
    return torch.cat(queries).view(*stream.shape[:2], -1, head_dim)


def feed_forward_input(
    stream: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    normed: None = None,
) -> torch.Tensor:
    """See `ddtree.kernels.layer_products.feed_forward_input`."""
    gated = [layer_products.feed_forward_input(row, norm, eps, weight, bias) for (row,) in _rows(stream)]
    return torch.cat(gated).view(*stream.shape[:2], -1)


def add_linear(
    stream: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tap: torch.Tensor | None = None,
    next_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """See `ddtree.kernels.layer_products.add_linear`; norms are left to what follows."""
    sums = []
    for row, row_x in _rows(stream, x):
        layer_products.add_linear(row, row_x, weight, bias)
        sums.append(row)
    stream.copy_(torch.cat(sums).view(stream.shape))
    if tap is not None:
        tap.copy_(stream)


def place_rows(
    base: torch.Tensor,
    depths: torch.Tensor,
    valid: torch.Tensor | None,
    block_table: torch.Tensor,
    page_tokens: int,
    frequencies: torch.Tensor,
    scale: float,
) -> Placement:
    """See `ddtree.kernels.placement.place_rows`."""
    together = placement.place_rows(base, depths, valid, block_table, page_tokens, frequencies, scale)
    positions = base[:, None] + depths
    own = frequencies.expand(*positions.shape, -1)
    at_root = positions.new_zeros(1, 1)
    alone = [
        placement.place_rows(position[0], at_root, None, block_table[:1], page_tokens, row, scale)
        for position, row in _rows(positions, own)
    ]
    cos, sin = (torch.cat([getattr(one, name) for one in alone]).view(own.shape) for name in ("cos", "sin"))
    return Placement(together.slots, cos, sin)


def choose(
    logits: torch.Tensor,
    sampling: SamplingTensors | None,
    tree: TreeTensors,
    committed: torch.Tensor,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ddtree.kernels.choose.choose`."""
    if sampling is None:
        return choose_twin.choose(logits, None, tree, committed, allowed)
    # Biases and penalties are single roundings, the same wherever an element stands.
    logits = choose_twin.adjust(logits.float(), sampling, tree)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    positions = committed[:, None] + tree.depths
    chosen = []
    for sequence in range(logits.shape[0]):
        own = _of_sequence(sampling, sequence)
        for row, token, position in _rows(
            logits[sequence : sequence + 1], tree.tokens[sequence : sequence + 1], positions[sequence : sequence + 1]
        ):
            chosen.append(choose_twin.choose(row, own, root_only(token[0]), position[0]))
    return torch.cat(chosen).view(logits.shape[:2])


def _of_sequence(sampling: SamplingTensors, sequence: int) -> SamplingTensors:
    """How one sequence samples, biases and penalties being dealt with."""
    fields = ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "seed_keys")
    own = {name: getattr(sampling, name)[sequence : sequence + 1] for name in fields}
    return replace(sampling, **own, output_counts=None, in_prompt=None, logit_bias=None)
