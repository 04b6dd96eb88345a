"""The frozen target over packed rows: taps for the drafter, and what it says next at every place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

from ddtree.models.target import Target
from ddtree.train.block_mask import Mask, TargetMask, attend
from ddtree.train.compiling import Wrap
from ddtree.train.packing import PackedRows
from ddtree.train.rotation import rms_norm, rotate, rotation


@dataclass(frozen=True)
class Seen:
    """What the target makes of a micro-batch.

    Attributes:
        taps: ``[rows, row_tokens, n_taps * hidden]``.
        last: ``[rows, row_tokens, hidden]`` after the final norm, whose product with the head says what comes next;
            None where nobody asked.
    """

    taps: torch.Tensor
    last: torch.Tensor | None


class FrozenTarget:
    """Runs the target without a cache, whole conversations at once.

    Args:
        tap_layers: layers whose output the drafter reads.
        rows, row_tokens: shape of every micro-batch.
        wrap: see `ddtree.train.compiling`.
    """

    def __init__(
        self,
        target: Target,
        tap_layers: tuple[int, ...],
        rows: int,
        row_tokens: int,
        wrap: Wrap,
    ) -> None:
        self.target, self._tap_layers = target, tap_layers
        self._mask = TargetMask(rows, row_tokens, target.config.sliding_windows, target.device)
        self._layer, self._norm = wrap(_layer), wrap(rms_norm)
        shape = target.config.layer
        self._sizes = (shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.norm_eps)
        # In a tuple, because torch.compile would take each layer's dataclass for a reason to compile anew.
        self._layers = [
            (
                layer.input_norm, layer.qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, layer.output,
                layer.output_bias, layer.post_norm, layer.gate_up, layer.gate_up_bias, layer.down, layer.down_bias,
            )
            for layer in target.layers
        ]  # fmt: skip

    @torch.no_grad()
    def __call__(self, rows: PackedRows, *, says_next: bool) -> Seen:
        """One forward pass; layers that nobody needs are left out.

        Args:
            says_next: whether ``last`` is wanted.
        """
        target, config = self.target, self.target.config
        here = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
        cos, sin = rotation(target.rope, here - rows.starts, rows.answers - rows.starts)
        masks = self._mask.masks(rows.starts)
        stream = torch.nn.functional.embedding(rows.tokens, target.embedding)
        taps: dict[int, torch.Tensor] = {}
        for i, (layer, window) in enumerate(zip(self._layers, config.sliding_windows, strict=True)):
            stream = self._layer(stream, cos, sin, masks[window], layer, self._sizes)
            if i in self._tap_layers:
                taps[i] = stream
            if not says_next and i == max(self._tap_layers):
                break
        last = self._norm(stream, target.final_norm, config.layer.norm_eps) if says_next else None
        return Seen(torch.cat([taps[i] for i in self._tap_layers], dim=-1), last)


def _layer(
    stream: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: Mask,
    weights: tuple[torch.Tensor, ...],
    sizes: tuple[int, int, int, float],
) -> torch.Tensor:
    """One decoder layer, ``[rows, row_tokens, hidden]`` to the same."""
    input_norm, qkv, qkv_bias, q_norm, k_norm, output, output_bias = weights[:7]
    post_norm, gate_up, gate_up_bias, down, down_bias = weights[7:]
    n_heads, n_kv_heads, head_dim, eps = sizes
    rows, tokens, _ = stream.shape
    heads = linear(rms_norm(stream, input_norm, eps), qkv, qkv_bias).view(rows, tokens, -1, head_dim).transpose(1, 2)
    query, key, value = heads.split((n_heads, n_kv_heads, n_kv_heads), dim=1)
    if q_norm is not None:
        query, key = rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps)
    attended = attend(rotate(query, cos, sin), rotate(key, cos, sin), value.contiguous(), mask)
    stream = stream + linear(attended.transpose(1, 2).flatten(2), output, output_bias)
    gate, up = linear(rms_norm(stream, post_norm, eps), gate_up, gate_up_bias).chunk(2, dim=-1)
    return stream + linear(silu(gate) * up, down, down_bias)
