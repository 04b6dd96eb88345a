"""Where generated conversations end, and what room they need."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree.models.target import Target

PAGE_TOKENS = 16


@dataclass(frozen=True)
class Limits:
    """Where conversations end.

    Attributes:
        prompt_tokens: of a prompt, the target's own part of it included.
        answer_tokens: of an answer.
        turn_enders: tokens that end a user's turn which the target completes.
        answer_enders: tokens that end an answer.
    """

    prompt_tokens: int
    answer_tokens: int
    turn_enders: frozenset[int]
    answer_enders: frozenset[int]

    @property
    def tokens(self) -> int:
        """Of prompt and answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def pages(self) -> int:
        """Pages of the cache that one conversation can fill."""
        return -(-self.tokens // PAGE_TOKENS)


def seat_bytes(target: Target, limits: Limits) -> int:
    """Memory that one seat takes: keys and values, and its logits in float32 and as the model gives them."""
    config, size = target.config, target.dtype.itemsize
    cache = config.n_layers * config.layer.kv_size * limits.pages * PAGE_TOKENS * size
    return cache + config.vocab_size * (2 * size + 4)
