"""A plain DFlash drafter: no cache, no batch, one query row at a time, in float64.

Written from the definition alone; it shares no code with the package, so that both can only agree by being right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


class PlainDrafter:
    """A drafter folder beside the embedding and the head of its target.

    Args:
        embedding, head: ``[vocab, hidden]`` of the target.
        block_size: instead of the config's.
        draft_window: see only so many of the last committed tokens.
        sliding_is_causal: whether layers with a sliding window see the block causally.
    """

    def __init__(
        self,
        folder: Path,
        embedding: torch.Tensor,
        head: torch.Tensor,
        *,
        block_size: int | None = None,
        draft_window: int | None = None,
        sliding_is_causal: bool = False,
        draft_temperature: float | None = None,
    ) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._weights = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
        self._embedding, self._head = embedding.double(), head.double()
        self.block_size = block_size or self.config["block_size"]
        self._draft_window, self._sliding_is_causal = draft_window, sliding_is_causal
        self.temperature = draft_temperature or self.config["dflash_config"].get("draft_temperature", 1.0)

    @property
    def tap_layers(self) -> list[int]:
        return self.config["dflash_config"]["target_layer_ids"]

    @torch.no_grad()
    def logits(self, taps: torch.Tensor, root: int) -> torch.Tensor:
        """float64 logits ``[block - 1, vocab]`` for depths 1 .. block - 1.

        Args:
            taps: ``[committed, n_taps * hidden]`` of all committed tokens; the root stands at position ``committed``.
        """
        committed = len(taps)
        mask = self.config["dflash_config"]["mask_token_id"]
        block = [root] + [mask] * (self.block_size - 1)
        positions = [committed + slot for slot in range(self.block_size)]
        context = self._norm(self._linear(taps.double(), "fc"), "hidden_norm")
        hidden = self._embedding[torch.tensor(block)]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            normed = self._norm(hidden, f"{name}.input_layernorm")
            hidden = hidden + self._attention(name, layer, normed, positions, context)
            normed = self._norm(hidden, f"{name}.post_attention_layernorm")
            gate, up = self._linear(normed, f"{name}.mlp.gate_proj"), self._linear(normed, f"{name}.mlp.up_proj")
            hidden = hidden + self._linear(gate / (1 + torch.exp(-gate)) * up, f"{name}.mlp.down_proj")
        return self._norm(hidden, "norm")[1:] @ self._head.T

    def _attention(
        self, name: str, layer: int, block: torch.Tensor, positions: list[int], context: torch.Tensor
    ) -> torch.Tensor:
        """Attention of the block's rows; context tokens enter without the layer's input norm."""
        committed = len(context)
        key_positions = [*range(committed), *positions]
        queries = self._heads(block, name, "q", positions)
        keys = self._heads(torch.cat((context, block)), name, "k", key_positions)
        values = self._heads(torch.cat((context, block)), name, "v", key_positions)
        heads, head_dim = queries.shape[1:]
        group = heads // keys.shape[1]
        rows = []
        for row, position in enumerate(positions):
            seen = [i for i, key in enumerate(key_positions) if self._sees(layer, position, key, committed)]
            parts = []
            for head in range(heads):
                scores = keys[seen, head // group] @ queries[row, head] / head_dim**0.5
                weights = torch.exp(scores - scores.max())
                parts.append((weights / weights.sum()) @ values[seen, head // group])
            rows.append(torch.cat(parts))
        return self._linear(torch.stack(rows), f"{name}.self_attn.o_proj")

    def _sees(self, layer: int, query: int, key: int, committed: int) -> bool:
        """Whether the block's row at position ``query`` sees the key at position ``key``."""
        is_sliding = self.config["layer_types"][layer] == "sliding_attention"
        if is_sliding and query - key >= self.config["sliding_window"]:
            return False
        if key < committed:
            return self._draft_window is None or key >= committed - self._draft_window
        is_causal = self.config.get("is_causal", False) or (is_sliding and self._sliding_is_causal)
        return key <= query or not is_causal

    def _heads(self, x: torch.Tensor, name: str, which: str, positions: list[int]) -> torch.Tensor:
        """``[rows, heads, head_dim]``; queries and keys are normed and rotated."""
        head_dim = self.config["head_dim"]
        heads = self._linear(x, f"{name}.self_attn.{which}_proj").reshape(len(x), -1, head_dim)
        if which == "v":
            return heads
        heads = self._norm(heads, f"{name}.self_attn.{which}_norm")
        frequencies = torch.tensor([self._frequency(i) for i in range(head_dim // 2)], dtype=torch.float64)
        angles = (torch.tensor(positions, dtype=torch.float64)[:, None] * frequencies)[:, None]
        first, second = heads[..., : head_dim // 2], heads[..., head_dim // 2 :]
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
        )

    def _frequency(self, pair: int) -> float:
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        kind = rope.get("rope_type", "default")
        assert kind in ("default", "linear"), f"rope_type {kind} is not written down here"
        theta = rope.get("rope_theta") or self.config["rope_theta"]
        return theta ** (-2 * pair / self.config["head_dim"]) / (rope["factor"] if kind == "linear" else 1)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out = x @ self._weights[f"{name}.weight"].T
        bias = self._weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.config["rms_norm_eps"]) * self._weights[f"{name}.weight"]
