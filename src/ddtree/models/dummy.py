"""Models of a given shape with random weights, for measuring speed without a checkpoint."""

from collections.abc import Sequence

import torch

from ddtree.kernels.kernel_set import KernelSet
from ddtree.models.drafter import Drafter, assemble_drafter
from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.layer import LayerWeights
from ddtree.models.rope import RotaryEmbedding
from ddtree.models.target import Target
from ddtree.models.target_config import LayerShape, TargetConfig

SCALE = 0.02


class DummyTokenizer:
    """Stands in for a tokenizer where tokens mean nothing: prompts are token ids, answers have no text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""


def dummy_target(
    config: TargetConfig, dtype: torch.dtype, device: torch.device, kernels: KernelSet, seed: int = 0
) -> Target:
    """A target of ``config``'s shape."""
    draw = _Draw(dtype, device, seed)
    hidden = config.layer.hidden_size
    table = draw.matrix(config.vocab_size, hidden)
    head = table if config.tied_head else draw.matrix(config.vocab_size, hidden)
    layers = tuple(draw.layer(config.layer) for _ in range(config.n_layers))
    return Target(config, table, head, layers, draw.ones(hidden), RotaryEmbedding(config.rope, device), kernels)


def dummy_drafter(config: DrafterConfig, target: Target, kernels: KernelSet, seed: int = 1) -> Drafter:
    """A drafter of ``config``'s shape for ``target``."""
    draw = _Draw(target.dtype, target.device, seed)
    hidden = config.layer.hidden_size
    layers = tuple(draw.layer(config.layer) for _ in range(config.n_layers))
    fuse = draw.matrix(hidden, len(config.tap_layers) * hidden)
    return assemble_drafter(config, target, fuse, draw.ones(hidden), layers, draw.ones(hidden), kernels)


class _Draw:
    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        empty = torch.empty(rows, columns, dtype=self._dtype, device=self._device)
        return empty.normal_(0, SCALE, generator=self._generator)

    def ones(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=self._dtype, device=self._device)

    def layer(self, shape: LayerShape) -> LayerWeights:
        hidden, q, kv = shape.hidden_size, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim

        def bias(wanted: bool, size: int) -> torch.Tensor | None:
            return self.matrix(1, size)[0] if wanted else None

        return LayerWeights(
            input_norm=self.ones(hidden),
            qkv=self.matrix(q + 2 * kv, hidden),
            qkv_bias=bias(shape.qkv_bias, q + 2 * kv),
            q_norm=self.ones(shape.head_dim) if shape.qk_norm else None,
            k_norm=self.ones(shape.head_dim) if shape.qk_norm else None,
            output=self.matrix(hidden, q),
            output_bias=bias(shape.output_bias, hidden),
            post_norm=self.ones(hidden),
            gate_up=self.matrix(2 * shape.intermediate_size, hidden),
            gate_up_bias=bias(shape.mlp_bias, 2 * shape.intermediate_size),
            down=self.matrix(hidden, shape.intermediate_size),
            down_bias=bias(shape.mlp_bias, hidden),
        )
