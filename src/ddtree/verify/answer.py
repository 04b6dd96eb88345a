"""A question to a server, its answer, and what the engine told about how the answer came about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Order:
    """One greedy request.

    Attributes:
        prompt: the user's turn of a chat, or bare text or token ids to continue.
        top_logprobs: alternatives wanted at each generated token; 0 asks for none.
        mode: for engines that can decode one request plainly: `ar`, `chain` or `tree`; None takes the server's own.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    is_chat: bool = False
    top_logprobs: int = 0
    mode: str | None = None


@dataclass(frozen=True)
class TokenChance:
    """A generated token.

    Attributes:
        top: texts of the likeliest tokens with their log-probabilities, best first.
    """

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Rounds:
    """What a response told about its own rounds.

    Attributes:
        count: verify calls.
        committed: tokens that they committed.
        budgets: nodes proposed a round, as far as told; one entry a round, or one for all.
        notes: what ran otherwise than asked.
    """

    count: int
    committed: int
    budgets: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """One answer; counts as the server's ``usage`` tells them.

    Attributes:
        seconds: from the request to the last byte.
        token_ids: of the answer, where the engine tells them.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    rounds: Rounds | None = None
    token_ids: tuple[int, ...] | None = None
    chances: tuple[TokenChance, ...] = ()


@dataclass(frozen=True)
class Speed:
    """A streamed answer on the client's clock.

    Attributes:
        decode_tok_s: tokens a second after the first piece came.
    """

    ttft_ms: float
    decode_tok_s: float
    completion_tokens: int
