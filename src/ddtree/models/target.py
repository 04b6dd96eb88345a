"""The target: a decoder of the Llama, Qwen2 or Qwen3 family."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ddtree.errors import UserError
from ddtree.kernels.kernel_set import TWINS, KernelSet
from ddtree.models.layer import LayerWeights, Pass, load_layer, run_layers
from ddtree.models.rope import RotaryEmbedding
from ddtree.models.target_config import TargetConfig, read_target_config
from ddtree.models.weights import Weights


@dataclass(frozen=True)
class Hidden:
    """What a forward pass of the target yields.

    Attributes:
        last: ``[batch, rows, hidden]`` after the final norm.
        taps: ``[batch, rows, n_taps * hidden]``, outputs of the tapped layers side by side, or None.
    """

    last: torch.Tensor
    taps: torch.Tensor | None


@dataclass(frozen=True)
class Target:
    """A target model on one device."""

    config: TargetConfig
    embedding: torch.Tensor
    head: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    rope: RotaryEmbedding
    kernels: KernelSet = TWINS

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[batch, rows]`` token ids to ``[batch, rows, hidden]``."""
        return self.kernels.embed_rows(self.embedding, tokens)

    def forward(self, tokens: torch.Tensor, run: Pass, cache: torch.Tensor, tap_layers: tuple[int, ...] = ()) -> Hidden:
        """Run the decoder over new rows.

        Args:
            tokens: int64 ``[batch, rows]``.
            run: positions, slots and attention of the rows.
            cache: ``[layers, 2, slots, kv_heads, head_dim]``, written at the rows' slots.
            tap_layers: layers whose output (Hugging Face's ``hidden_states[i + 1]``) is kept, in this order.
        """
        last, taps = run_layers(
            self.embed(tokens), self.layers, self.final_norm, self.config.layer, run, cache,
            self.config.sliding_windows, self.kernels, tap_layers,
        )  # fmt: skip
        return Hidden(last, taps if tap_layers else None)

    def logits(self, hidden: torch.Tensor, kernels: KernelSet | None = None) -> torch.Tensor:
        """``[..., hidden]`` to logits ``[..., vocab]`` in the model's type, by the target's kernels or by others."""
        # As one flat product: a sliced batch would make torch copy the whole head on the CPU.
        flat = (kernels or self.kernels).linear(hidden.reshape(-1, hidden.shape[-1]), self.head)
        return flat.view(*hidden.shape[:-1], -1)


def load_target(folder: Path, dtype: torch.dtype, device: torch.device, kernels: KernelSet = TWINS) -> Target:
    """Load a target from a Hugging Face folder.

    Raises:
        UserError: not a model of the known families, damaged, quantised, or with tensors that do not fit its config.
    """
    config = read_target_config(folder)
    shape = config.layer
    with Weights(folder, dtype, device) as weights:
        table = weights.take("model.embed_tokens.weight", (config.vocab_size, shape.hidden_size))
        head = table
        if "lm_head.weight" in weights:
            head = weights.take("lm_head.weight", table.shape)
            if config.tied_head:
                if not torch.equal(head, table):
                    raise UserError(
                        f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from the embedding",
                        "set tie_word_embeddings to what the model was trained with",
                    )
                head = table
        elif not config.tied_head:
            weights.take("lm_head.weight", table.shape)
        layers = tuple(load_layer(weights, f"model.layers.{i}", shape) for i in range(config.n_layers))
        final_norm = weights.take("model.norm.weight", (shape.hidden_size,))
        weights.close()
    return Target(config, table, head, layers, final_norm, RotaryEmbedding(config.rope, device), kernels)
