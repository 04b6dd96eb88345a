"""The DFlash drafter: one forward pass proposes a whole block (arXiv 2602.06036)."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear

from ddtree.kernels.kernel_set import TWINS, KernelSet
from ddtree.kernels.placement import Placement
from ddtree.models.drafter_config import DrafterConfig, SlidingBlock, read_drafter_config
from ddtree.models.layer import LayerWeights, Pass, load_layer, run_layers
from ddtree.models.rope import RotaryEmbedding
from ddtree.models.target import Target
from ddtree.models.weights import Weights


@dataclass(frozen=True)
class Drafter:
    """A drafter beside its target, whose embedding and head it uses.

    Attributes:
        fuse: ``[hidden, n_taps * hidden]``, the checkpoint's `fc`.
        context_kv: the key and value rows of all layers below each other, so that injection is one matrix product.
        context_k_norms: ``[layers, head_dim]``, or None where heads are not normed.
    """

    config: DrafterConfig
    target: Target
    fuse: torch.Tensor
    fuse_norm: torch.Tensor
    layers: tuple[LayerWeights, ...]
    context_kv: torch.Tensor
    context_kv_bias: torch.Tensor | None
    context_k_norms: torch.Tensor | None
    final_norm: torch.Tensor
    rope: RotaryEmbedding
    kernels: KernelSet = TWINS

    def inject(self, taps: torch.Tensor, placement: Placement, cache: torch.Tensor) -> None:
        """Write the context keys and values of committed tokens into the drafter's cache.

        Args:
            taps: ``[batch, rows, n_taps * hidden]``, target taps of committed tokens.
            placement: the tokens' slots and angles; a slot of the trash page drops a row.
            cache: ``[layers, 2, slots, kv_heads, head_dim]``.
        """
        eps = self.config.layer.norm_eps
        context = self.kernels.rms_norm(linear(taps, self.fuse), self.fuse_norm, eps)
        self.kernels.write_context(
            linear(context, self.context_kv, self.context_kv_bias), self.context_k_norms, eps,
            placement.cos, placement.sin, cache, placement.slots,
        )  # fmt: skip

    def draft(self, roots: torch.Tensor, run: Pass, cache: torch.Tensor) -> torch.Tensor:
        """Propose what follows the roots.

        Args:
            roots: int64 ``[batch]``. They stand in slot 0 of the block; every other slot holds the mask token.
            run: positions ``committed .. committed + block_size - 1``, their slots, attention over context and block.
            cache: as in `inject`; the block's own rows are scratch, overwritten when their tokens are injected.

        Returns:
            logits ``[batch, block_size - 1, vocab]`` in the model's type, for depths 1 .. block_size - 1: slot j speaks
            of its own position, there is no shift.
        """
        block = self.kernels.embed_rows(
            self.target.embedding, roots[:, None], self.config.block_size, self.config.mask_token_id
        )
        last, _ = run_layers(
            block, self.layers, self.final_norm, self.config.layer, run, cache,
            self.config.sliding_windows, self.kernels,
        )  # fmt: skip
        return self.target.logits(last[:, 1:], self.kernels)


def load_drafter(
    folder: Path,
    target: Target,
    *,
    block_size: int | None = None,
    sliding_block: SlidingBlock = "bidirectional",
    draft_temperature: float | None = None,
    kernels: KernelSet = TWINS,
) -> Drafter:
    """Load a DFlash drafter for ``target``, in the target's type and on its device.

    Raises:
        UserError: not a DFlash drafter, one of another target, damaged, or with tensors that do not fit its config.
    """
    config = read_drafter_config(
        folder, target.config,
        block_size=block_size, sliding_block=sliding_block, draft_temperature=draft_temperature,
    )  # fmt: skip
    hidden = config.layer.hidden_size
    with Weights(folder, target.dtype, target.device) as weights:
        fuse = weights.take("fc.weight", (hidden, len(config.tap_layers) * hidden))
        fuse_norm = weights.take("hidden_norm.weight", (hidden,))
        layers = tuple(load_layer(weights, f"layers.{i}", config.layer) for i in range(config.n_layers))
        final_norm = weights.take("norm.weight", (hidden,))
        weights.close()
    return assemble_drafter(config, target, fuse, fuse_norm, layers, final_norm, kernels)


def assemble_drafter(
    config: DrafterConfig,
    target: Target,
    fuse: torch.Tensor,
    fuse_norm: torch.Tensor,
    layers: tuple[LayerWeights, ...],
    final_norm: torch.Tensor,
    kernels: KernelSet,
) -> Drafter:
    """A drafter from its weights; see `Drafter`."""
    q_rows = config.layer.n_heads * config.layer.head_dim
    k_norms = [layer.k_norm for layer in layers if layer.k_norm is not None]
    biases = [layer.qkv_bias[q_rows:] for layer in layers if layer.qkv_bias is not None]
    return Drafter(
        config=config,
        target=target,
        fuse=fuse,
        fuse_norm=fuse_norm,
        layers=layers,
        context_kv=torch.cat([layer.qkv[q_rows:] for layer in layers]),
        context_kv_bias=torch.cat(biases) if biases else None,
        context_k_norms=torch.stack(k_norms) if k_norms else None,
        final_norm=final_norm,
        rope=RotaryEmbedding(config.rope, target.device),
        kernels=kernels,
    )
