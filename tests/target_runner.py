"""Runs a target's forward pass over a paged cache with scattered pages, row by row as a test asks for it."""

from __future__ import annotations

from pathlib import Path

import torch

from ddtree.kernels.placement import place_rows
from ddtree.kernels.tree_attention import TreeAttention
from ddtree.models.layer import Pass
from ddtree.models.target import Hidden, load_target

PAGE_TOKENS = 4


class TargetRunner:
    """One sequence of ``prompt_tokens`` prompt tokens on a target in float32.

    Attributes:
        committed: tokens whose keys and values are kept.
    """

    def __init__(self, folder: Path, prompt_tokens: int, max_tokens: int = 128) -> None:
        self.target = load_target(folder, torch.float32, torch.device("cpu"))
        config = self.target.config
        n_pages = max_tokens // PAGE_TOKENS
        self._cache = torch.full(
            (config.n_layers, 2, (n_pages + 1) * PAGE_TOKENS, config.layer.n_kv_heads, config.layer.head_dim), 1e3
        )  # what a test reads without having written it shows
        self._table = (torch.randperm(n_pages, generator=torch.Generator().manual_seed(5)) + 1)[None]
        self._prompt_tokens = torch.tensor([prompt_tokens])
        self.committed = 0

    def chain(self, tokens: list[int]) -> torch.Tensor:
        """Commit tokens; logits ``[rows, vocab]`` after each."""
        rows = len(tokens)
        seen = torch.ones(rows, rows, dtype=torch.bool).tril()
        logits = self._forward(tokens, list(range(rows)), seen)
        self.committed += rows
        return logits

    def tree(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        """Logits after every node of a tree below the committed tokens, which stays uncommitted.

        Args:
            parents: index of each node's parent, -1 for the last committed token.
        """
        depths, seen = [], torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        for node, parent in enumerate(parents):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            seen[node] = seen[parent] if parent >= 0 else False
            seen[node, node] = True
        return self._forward(tokens, depths, seen)

    def taps(self, tokens: list[int], layers: tuple[int, ...]) -> torch.Tensor:
        """Commit tokens; outputs of ``layers`` side by side."""
        seen = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        hidden = self._hidden(tokens, list(range(len(tokens))), seen, layers)
        self.committed += len(tokens)
        assert hidden.taps is not None
        return hidden.taps[0]

    def _forward(self, tokens: list[int], depths: list[int], seen: torch.Tensor) -> torch.Tensor:
        return self.target.logits(self._hidden(tokens, depths, seen, ()).last)[0]

    def _hidden(self, tokens: list[int], depths: list[int], seen: torch.Tensor, layers: tuple[int, ...]) -> Hidden:
        committed, depth = torch.tensor([self.committed]), torch.tensor([depths])
        attention = TreeAttention(
            self._table, committed, depth, seen[None], PAGE_TOKENS, self.committed, None, torch.float32
        )
        rope = self.target.rope
        frequencies = rope.frequencies(lambda: committed[:, None] + depth, self._prompt_tokens)
        placement = place_rows(committed, depth, None, self._table, PAGE_TOKENS, frequencies, rope.scale)
        run = Pass(placement, attention)
        with torch.no_grad():
            return self.target.forward(torch.tensor([tokens]), run, self._cache, layers)
