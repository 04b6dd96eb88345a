"""One decoder layer, the same for the target and for the drafter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ddtree.kernels.kernel_set import KernelSet
from ddtree.kernels.placement import Placement
from ddtree.models.target_config import LayerShape
from ddtree.models.weights import Weights

AttentionCall = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int | None], torch.Tensor]
"""``(query, keys, values, sliding_window)``; see `ddtree.kernels.tree_attention.TreeAttention`."""


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a layer; q/k/v and gate/up stand below each other, so that each is one matrix product."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class Pass:
    """What all layers of one forward pass share.

    Attributes:
        placement: slots and angles of the rows.
        attention: attention of the rows over the cache and each other.
    """

    placement: Placement
    attention: AttentionCall


def load_layer(weights: Weights, prefix: str, shape: LayerShape) -> LayerWeights:
    """Take the tensors of the layer ``prefix`` (Hugging Face names)."""
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv_names, qkv_rows = [f"{attention}.{name}_proj" for name in "qkv"], (q, kv, kv)
    gate_up_names, gate_up_rows = [f"{mlp}.gate_proj", f"{mlp}.up_proj"], (shape.intermediate_size,) * 2

    def biases(names: list[str], rows: tuple[int, ...], wanted: bool) -> torch.Tensor | None:
        return weights.stack([f"{name}.bias" for name in names], rows, None) if wanted else None

    return LayerWeights(
        input_norm=weights.take(f"{prefix}.input_layernorm.weight", (shape.hidden_size,)),
        qkv=weights.stack([f"{name}.weight" for name in qkv_names], qkv_rows, shape.hidden_size),
        qkv_bias=biases(qkv_names, qkv_rows, shape.qkv_bias),
        q_norm=weights.take(f"{attention}.q_norm.weight", (shape.head_dim,)) if shape.qk_norm else None,
        k_norm=weights.take(f"{attention}.k_norm.weight", (shape.head_dim,)) if shape.qk_norm else None,
        output=weights.take(f"{attention}.o_proj.weight", (shape.hidden_size, q)),
        output_bias=biases([f"{attention}.o_proj"], (shape.hidden_size,), shape.output_bias),
        post_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", (shape.hidden_size,)),
        gate_up=weights.stack([f"{name}.weight" for name in gate_up_names], gate_up_rows, shape.hidden_size),
        gate_up_bias=biases(gate_up_names, gate_up_rows, shape.mlp_bias),
        down=weights.take(f"{mlp}.down_proj.weight", (shape.hidden_size, shape.intermediate_size)),
        down_bias=biases([f"{mlp}.down_proj"], (shape.hidden_size,), shape.mlp_bias),
    )


def run_layers(
    stream: torch.Tensor,
    layers: Sequence[LayerWeights],
    final_norm: torch.Tensor,
    shape: LayerShape,
    run: Pass,
    cache: torch.Tensor,
    sliding_windows: Sequence[int | None],
    kernels: KernelSet,
    tap_layers: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run all layers and the final norm.

    Args:
        stream: ``[batch, rows, hidden]``, the embedded rows, which become the residual stream: overwritten.
        cache: ``[layers, 2, slots, kv_heads, head_dim]``; the rows' keys and values are written to it.
        tap_layers: layers whose output is kept.

    Returns:
        normed rows ``[batch, rows, hidden]``, and the outputs of the tapped layers ``[batch, rows, n_taps * hidden]``
        side by side.
    """
    batch, rows, hidden = stream.shape
    taps = stream.new_empty(batch, rows, len(tap_layers), hidden)
    place, normed = run.placement, None
    norms = [layer.input_norm for layer in layers[1:]] + [final_norm]
    for i, layer in enumerate(layers):
        query = kernels.attend_input(
            stream, layer.input_norm, shape.norm_eps, layer.qkv, layer.qkv_bias, shape.head_dim,
            layer.q_norm, layer.k_norm, place.cos, place.sin, cache[i], place.slots, normed,
        )  # fmt: skip
        attended = run.attention(query, cache[i, 0], cache[i, 1], sliding_windows[i])
        normed = kernels.add_linear(
            stream, attended, layer.output, layer.output_bias, None, layer.post_norm, shape.norm_eps
        )
        gated = kernels.feed_forward_input(
            stream, layer.post_norm, shape.norm_eps, layer.gate_up, layer.gate_up_bias, normed
        )
        tap = taps[:, :, tap_layers.index(i)] if i in tap_layers else None
        normed = kernels.add_linear(stream, gated, layer.down, layer.down_bias, tap, norms[i], shape.norm_eps)
    for j, tapped in enumerate(tap_layers):
        if (first := tap_layers.index(tapped)) != j:  # a drafter may read a layer twice
            taps[:, :, j] = taps[:, :, first]
    last = kernels.rms_norm(stream, final_norm, shape.norm_eps) if normed is None else normed
    return last, taps.flatten(2)
