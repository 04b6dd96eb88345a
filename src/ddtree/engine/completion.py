"""What a request gets back."""

from dataclasses import dataclass, field
from typing import Literal

from ddtree.engine.logprobs import TokenLogprob
from ddtree.engine.speculation import Mode
from ddtree.tree import DraftTree

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TracedTree:
    """One round's tree and what the target made of it.

    Attributes:
        tree: the nodes below the root.
        root_token: the committed token on top.
        path: accepted nodes in order.
        bonus_token: the target's own token after them, the next root.
    """

    tree: DraftTree
    root_token: int
    path: tuple[int, ...]
    bonus_token: int


@dataclass
class RoundStats:
    """How an answer came about. Times are of the wall clock, in milliseconds.

    Attributes:
        mode: the mode that really ran.
        budget: nodes of a round's tree without the root, or `auto`.
        notes: what ran otherwise than asked, one sentence each; empty where nothing did.
        accepted_lengths: tokens of each round, bonus included; the last one as cut by a stop.
        round_ms: time of each round.
        round_budgets: nodes that each round's tree could have; 0 for a step of plain decoding.
        ttft_ms: from the request's arrival to its first token.
        cached_tokens: tokens of the prompt whose keys and values were there from earlier sequences.
    """

    mode: Mode
    budget: int | Literal["auto"]
    notes: list[str] = field(default_factory=list)
    accepted_lengths: list[int] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    round_budgets: list[int] = field(default_factory=list)
    ttft_ms: float = 0.0
    cached_tokens: int = 0

    @property
    def rounds(self) -> int:
        return len(self.accepted_lengths)

    @property
    def tau(self) -> float:
        """Committed tokens per round; 0 where there was no round."""
        return sum(self.accepted_lengths) / self.rounds if self.rounds else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second after the first token; 0 where there was no round."""
        elapsed_ms = sum(self.round_ms)
        return 1e3 * sum(self.accepted_lengths) / elapsed_ms if elapsed_ms else 0.0


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        text: without the stop string and without special tokens.
        token_ids: all tokens, a stop token included.
        prompt_tokens: length of the prompt.
        finish_reason: `stop` for an end token, stop token or stop string; `length` for a limit.
        trees: the rounds' trees, where they were asked for.
        logprobs: one for each token, where they were asked for.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    stats: RoundStats
    trees: list[TracedTree] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True)
class StreamEvent:
    """A piece of an answer: new text and tokens, and the whole completion with the last piece."""

    text: str
    token_ids: list[int]
    completion: Completion | None = None
