"""Whole answers by DDTree, plain and slow: no cache, no batch, prefixes sorted by hand, the target run on every path.

Target and tokens come from transformers, the drafter is the plain one. Nothing here comes from the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from plain_dflash import PlainDrafter

Prefix = tuple[int, ...]


@dataclass
class PlainTree:
    """One round's tree.

    Attributes:
        scores: float32 score of each chosen prefix (its tokens from depth 1 down), best first.
        log_probs: float32 ``[depths, vocab]`` of the drafter, to score a prefix that was not chosen.
    """

    scores: dict[Prefix, np.float32]
    log_probs: np.ndarray

    def score(self, prefix: Prefix) -> np.float32:
        total = np.float32(0)
        for depth, token in enumerate(prefix):
            total = np.float32(total + self.log_probs[depth, token])
        return total


@dataclass
class PlainAnswer:
    """Tokens of an answer, how many each round gave, and the rounds' trees."""

    tokens: list[int] = field(default_factory=list)
    accepted_lengths: list[int] = field(default_factory=list)
    trees: list[PlainTree] = field(default_factory=list)
    finish_reason: str = ""


class PlainEngine:
    """Greedy answers of one pair.

    Args:
        max_model_len: prompt and answer have at most so many tokens.
        drafter_positions: where the drafter's context ends; no draft reaches beyond it.
    """

    def __init__(
        self, target: PreTrainedModel, drafter: PlainDrafter, max_model_len: int, drafter_positions: int | None = None
    ) -> None:
        self._target, self._drafter, self._max_model_len = target, drafter, max_model_len
        self._drafter_positions = drafter_positions or drafter.config["max_position_embeddings"]
        self._seen: dict[Prefix, tuple[torch.Tensor, torch.Tensor]] = {}

    def answer(
        self, prompt: list[int], max_new_tokens: int, *, budget: int, top_k: int, stop_token_ids: tuple[int, ...] = ()
    ) -> PlainAnswer:
        """Round by round until a stop.

        Args:
            top_k: candidates per depth; 1 makes the tree a chain.
        """
        answer = PlainAnswer()
        limit = min(len(prompt) + max_new_tokens, self._max_model_len) - len(prompt)

        def take(tokens: list[int]) -> int:
            for count, token in enumerate(tokens, start=1):
                answer.tokens.append(token)
                if token in stop_token_ids:
                    answer.finish_reason = "stop"
                elif len(answer.tokens) == limit:
                    answer.finish_reason = "length"
                if answer.finish_reason:
                    return count
            return len(tokens)

        take([self._choice(prompt)])
        while not answer.finish_reason:
            committed, root = prompt + answer.tokens[:-1], answer.tokens[-1]
            tree = self.draft(committed, root, budget, top_k, self._drafter.temperature)
            answer.trees.append(tree)
            path: Prefix = ()
            while (*path, choice := self._choice([*committed, root, *path])) in tree.scores:
                path = (*path, choice)
            answer.accepted_lengths.append(take([*path, choice]))
        return answer

    @torch.no_grad()
    def _look(self, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The target on a whole text: logits after it, and the taps of all its tokens."""
        key = tuple(text)
        if key not in self._seen:
            out = self._target(torch.tensor([text]), output_hidden_states=True, use_cache=False)
            taps = [out.hidden_states[layer + 1][0] for layer in self._drafter.tap_layers]
            self._seen[key] = out.logits[0, -1], torch.cat(taps, dim=-1)
        return self._seen[key]

    def _choice(self, text: list[int]) -> int:
        logits = self._look(text)[0]
        return int((logits == logits.max()).nonzero()[0])  # equal logits: the lower token id

    def draft(self, committed: list[int], root: int, budget: int, top_k: int, temperature: float) -> PlainTree:
        """The best prefixes of the block behind the root; none where the block would leave the drafter's context."""
        if len(committed) + self._drafter.block_size > self._drafter_positions:
            return PlainTree({}, np.zeros((0, 0), np.float32))
        logits = self._drafter.logits(self._look(committed)[1], root)
        # The path and the bonus token behind it must still fit into the context.
        logits = logits[: max(self._max_model_len - 2 - len(committed), 0)]
        log_probs = torch.log_softmax(logits / temperature, dim=-1).float().numpy()
        return PlainTree(best_prefixes(log_probs, budget, top_k), log_probs)


def best_prefixes(log_probs: np.ndarray, budget: int, top_k: int) -> dict[Prefix, np.float32]:
    """The ``budget`` best prefixes by float32 score, then lower depth, then lower ranks, from all that could be."""
    depths, vocab = log_probs.shape
    ranked = [sorted(range(vocab), key=lambda token, row=row: (-row[token], token))[:top_k] for row in log_probs]
    entries = []
    for ranks in possible_ranks(depths, min(top_k, vocab), budget):
        score, tokens = np.float32(0), []
        for depth, rank in enumerate(ranks):
            tokens.append(ranked[depth][rank])
            score = np.float32(score + log_probs[depth, tokens[-1]])
        entries.append((-float(score), len(ranks), ranks, tuple(tokens)))
    return {tokens: np.float32(-negated) for negated, _, _, tokens in sorted(entries)[:budget]}


def possible_ranks(depths: int, k: int, budget: int) -> Iterator[tuple[int, ...]]:
    """Rank tuples that can be among the best ``budget``.

    A tuple stands behind every tuple that is nowhere larger, of its own length or shorter. Of those there are
    ``(r1 + 1) + (r1 + 1)(r2 + 1) + ...``, itself included; where that is more than the budget, it can not be chosen.
    """
    stack: list[tuple[tuple[int, ...], int, int]] = [((), 1, 0)]
    while stack:
        ranks, product, total = stack.pop()
        if ranks:
            yield ranks
        if len(ranks) < depths:
            for rank in range(k):
                wider = product * (rank + 1)
                if total + wider > budget:
                    break
                stack.append(((*ranks, rank), wider, total + wider))
