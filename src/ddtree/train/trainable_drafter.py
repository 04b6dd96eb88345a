"""The drafter as it is trained: parameters under their published names, many blocks in one differentiable pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn
from torch.nn.functional import embedding, linear, silu

from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.rope import RotaryEmbedding
from ddtree.models.target import Target
from ddtree.models.target_config import LayerShape
from ddtree.models.weights import Weights
from ddtree.train.anchors import Anchors, Looks
from ddtree.train.block_mask import DraftMask, Mask, attend
from ddtree.train.compiling import Wrap
from ddtree.train.durable import replace_json, replacing
from ddtree.train.packing import PackedRows
from ddtree.train.rotation import rms_norm, rotate, rotation


class Norm(nn.Module):
    """The weight of a root mean square norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Attention(nn.Module):
    """Parameters of the attention of one layer."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        queries, keys = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=shape.output_bias)
        self.q_norm, self.k_norm = Norm(shape.head_dim), Norm(shape.head_dim)


class FeedForward(nn.Module):
    """Parameters of the feed-forward block of one layer."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)


class Layer(nn.Module):
    """Parameters of one layer."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size)
        self.mlp = FeedForward(shape)


class TrainableDrafter(nn.Module):
    """Float32 master weights and the pass that drafts all blocks of a micro-batch.

    The parameters have the names and shapes of `DFlashDraftModel` (z-lab). `ddtree.models.drafter` computes the same in
    a cache, block by block; a test holds the two together.

    Args:
        folder_config: the `config.json` that the drafter is saved with.
    """

    def __init__(self, config: DrafterConfig, folder_config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.folder_config = config, folder_config
        hidden = config.layer.hidden_size
        self.fc = nn.Linear(len(config.tap_layers) * hidden, hidden, bias=False)
        self.hidden_norm = Norm(hidden)
        self.layers = nn.ModuleList(Layer(config.layer) for _ in range(config.n_layers))
        self.norm = Norm(hidden)

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Take over weights under their published names, all of them."""
        self.load_state_dict(weights, strict=True)

    def read(self, folder: Path) -> None:
        """Take over the weights of a drafter folder.

        Raises:
            UserError: damaged, or of other shapes than the config says.
        """
        with Weights(folder, torch.float32, torch.device("cpu")) as weights:
            self.load({name: weights.take(name, value.shape) for name, value in self.state_dict().items()})
            weights.close()

    def save(self, folder: Path) -> None:
        """Write `model.safetensors` (bfloat16) and `config.json`; each appears whole or not at all.

        Raises:
            UserError: the disk is full, or cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().to("cpu", torch.bfloat16) for name, value in self.state_dict().items()}
        with replacing(folder / "model.safetensors") as file:
            file.write(save(weights, metadata={"format": "pt"}))
        replace_json(folder / "config.json", self.folder_config)


class DraftPass:
    """Drafts the blocks of micro-batches of one shape, all at once.

    Args:
        rows, row_tokens, anchors: shape of every micro-batch.
        wrap: see `ddtree.train.compiling`.
    """

    def __init__(
        self,
        drafter: TrainableDrafter,
        target: Target,
        rows: int,
        row_tokens: int,
        anchors: int,
        draft_window: int | None,
        wrap: Wrap,
    ) -> None:
        config = drafter.config
        self._drafter, self._target = drafter, target
        self._rope = RotaryEmbedding(config.rope, target.device)
        self._mask = DraftMask(
            rows, row_tokens, anchors, config.block_size, config.sliding_windows,
            is_causal=config.is_causal, sliding_is_causal=config.sliding_block == "causal",
            draft_window=draft_window, device=target.device,
        )  # fmt: skip
        self._attend, self._feed_forward, self._norm = wrap(_attend), wrap(_feed_forward), wrap(rms_norm)
        shape = config.layer
        self._sizes = (shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.norm_eps)

    def __call__(self, rows: PackedRows, anchors: Anchors, looks: Looks, taps: torch.Tensor) -> torch.Tensor:
        """Final hidden states of the blocks, at the places looked at alone.

        Args:
            taps: ``[rows, row_tokens, n_taps * hidden]``, from `FrozenTarget`.

        Returns:
            ``[rows, looks, hidden]`` after the final norm, in the target's type.
        """
        config, dtype = self._drafter.config, self._target.dtype
        weights = {name: value.to(dtype) for name, value in self._drafter.named_parameters()}
        eps = config.layer.norm_eps
        block = config.block_size
        tokens = torch.full((*anchors.roots.shape, block), config.mask_token_id, device=taps.device)
        tokens[..., 0] = anchors.roots
        # It has a gradient that nobody reads, so that the first layer is compiled like the others.
        stream = embedding(tokens.flatten(1), self._target.embedding).requires_grad_()
        cos, sin = self._rotation(rows, anchors, block)
        masks = self._mask.masks(anchors.index, anchors.starts)
        context = self._norm(linear(taps, weights["fc.weight"]), weights["hidden_norm.weight"], eps)
        for i, window in enumerate(config.sliding_windows):
            of_layer = _names(weights, i)
            attended = self._attend(stream, context, cos, sin, masks[window], of_layer, self._sizes)
            if i == config.n_layers - 1:  # what follows mixes no rows: the others would be computed in vain
                slots = looks.anchor * block + looks.depth + 1
                stream, attended = _Rows.apply(stream, slots), _Rows.apply(attended, slots)
            stream = self._feed_forward(stream, attended, of_layer, eps)
        return self._norm(stream, weights["norm.weight"], eps)

    def _rotation(self, rows: PackedRows, anchors: Anchors, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the row's tokens, then of the blocks."""
        here = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
        slots = torch.arange(block, device=here.device)
        in_blocks = ((anchors.index - anchors.starts)[..., None] + slots).flatten(1)
        prompts = rows.answers - rows.starts
        of_blocks = prompts.gather(1, anchors.index).repeat_interleave(block, dim=1)
        return rotation(
            self._rope, torch.cat((here - rows.starts, in_blocks), dim=1), torch.cat((prompts, of_blocks), dim=1)
        )


def _names(weights: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """The parameters of one layer, without its prefix."""
    prefix = f"layers.{layer}."
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


class _Rows(torch.autograd.Function):
    """Some rows (``index`` ``[batch, n]``, none twice) of ``x`` ``[batch, rows, size]``, without atomic additions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        flat = (index + x.shape[1] * torch.arange(len(x), device=x.device)[:, None]).flatten()
        ctx.save_for_backward(flat)
        ctx.shape = x.shape
        return x.flatten(0, 1)[flat].view(*index.shape, -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (flat,) = ctx.saved_tensors
        whole = gradient.new_zeros(ctx.shape)
        whole.flatten(0, 1)[flat] = gradient.flatten(0, 1)
        return whole, None


def _attend(
    stream: torch.Tensor,
    context: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: Mask,
    weights: dict[str, torch.Tensor],
    sizes: tuple[int, int, int, float],
) -> torch.Tensor:
    """Attention of one layer before its output product, for ``stream`` ``[rows, anchors * block, hidden]``.

    The context enters without the layer's input norm.
    """

    def project(x: torch.Tensor, names: str) -> torch.Tensor:
        weight = torch.cat([weights[f"self_attn.{name}_proj.weight"] for name in names])
        bias = None
        if "self_attn.q_proj.bias" in weights:
            bias = torch.cat([weights[f"self_attn.{name}_proj.bias"] for name in names])
        return linear(x, weight, bias).view(*x.shape[:2], -1, head_dim).transpose(1, 2)

    n_heads, kv_heads, head_dim, eps = sizes
    queries = stream.shape[1]
    of_blocks = project(rms_norm(stream, weights["input_layernorm.weight"], eps), "qkv")
    of_context = project(context, "kv")
    query, key, value = of_blocks.split((n_heads, kv_heads, kv_heads), dim=1)
    key = torch.cat((of_context[:, :kv_heads], key), dim=2)
    value = torch.cat((of_context[:, kv_heads:], value), dim=2).contiguous()
    query = rms_norm(query, weights["self_attn.q_norm.weight"], eps)
    key = rms_norm(key, weights["self_attn.k_norm.weight"], eps)
    query = rotate(query, cos[:, -queries:], sin[:, -queries:])
    return attend(query, rotate(key, cos, sin), value, mask).transpose(1, 2).flatten(2)


def _feed_forward(
    stream: torch.Tensor, attended: torch.Tensor, weights: dict[str, torch.Tensor], eps: float
) -> torch.Tensor:
    """The rest of a layer."""
    stream = stream + linear(attended, weights["self_attn.o_proj.weight"], weights.get("self_attn.o_proj.bias"))
    normed = rms_norm(stream, weights["post_attention_layernorm.weight"], eps)
    gate, up = linear(normed, weights["mlp.gate_proj.weight"]), linear(normed, weights["mlp.up_proj.weight"])
    return stream + linear(silu(gate) * up, weights["mlp.down_proj.weight"])
