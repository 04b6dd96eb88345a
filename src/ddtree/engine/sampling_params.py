"""How one request's tokens are chosen and where they end."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddtree.engine.logprobs import MAX_LOGPROBS
from ddtree.errors import UserError

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request. The order is: bias, penalties, temperature, top-k, top-p, min-p.

    Attributes:
        max_new_tokens: at most so many tokens, at least 1.
        temperature: 0 takes the most likely token; else 0.001 to 100.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep so many tokens; 0 keeps all.
        min_p: drop tokens less likely than this share of the best one's probability, in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of tokens of prompt and answer, 0.01 to
            100.
        presence_penalty, frequency_penalty: taken off the logits of tokens of the answer, once or per occurrence, in
            [-2, 2].
        seed: 0 .. 2**63 - 1; the same seed gives the same text in every mode. None draws one.
        stop: strings that end the answer; they are not part of its text.
        stop_token_ids: tokens that end the answer, beside the model's own end tokens.
        ignore_eos: go on past the model's own end tokens.
        logit_bias: added to the logits of single tokens, -100 to 100, by token id.
        logprobs: tell the log-probability of every token, and of so many likeliest ones beside it, 0 to 20; None tells
            nothing.

    Raises:
        UserError: a value is out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, wanted: str) -> None:
            if not ok:
                raise UserError(f"{name} is {getattr(self, name)!r}", f"choose {wanted}")

        need(_whole(self.max_new_tokens) and self.max_new_tokens >= 1, "max_new_tokens", "a whole number of at least 1")
        need(
            _finite(self.temperature) and (self.temperature == 0 or 1e-3 <= self.temperature <= 100),
            "temperature",
            "0, or 0.001 to 100",
        )
        need(_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number above 0, at most 1")
        need(_whole(self.top_k) and self.top_k >= 0, "top_k", "a whole number of at least 0 (0 keeps all tokens)")
        need(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", "0 to 1")
        need(
            _finite(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 100,
            "repetition_penalty",
            "0.01 to 100",
        )
        need(_finite(self.presence_penalty) and abs(self.presence_penalty) <= 2, "presence_penalty", "-2 to 2")
        need(_finite(self.frequency_penalty) and abs(self.frequency_penalty) <= 2, "frequency_penalty", "-2 to 2")
        need(
            self.seed is None or (_whole(self.seed) and 0 <= self.seed <= MAX_SEED),
            "seed",
            f"a whole number from 0 to {MAX_SEED}",
        )
        need(
            not isinstance(self.stop, str) and all(isinstance(s, str) and s and _whole_text(s) for s in self.stop),
            "stop",
            "non-empty strings of whole characters",
        )
        need(all(_whole(i) and i >= 0 for i in self.stop_token_ids), "stop_token_ids", "token ids")
        need(
            all(_whole(i) and i >= 0 and _finite(b) and abs(b) <= 100 for i, b in self.logit_bias.items()),
            "logit_bias",
            "token ids, each with a number from -100 to 100",
        )
        need(
            self.logprobs is None or (_whole(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS),
            "logprobs",
            f"a whole number from 0 to {MAX_LOGPROBS}",
        )

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p can drop a token."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """Whether a penalty can change a logit."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole_text(text: str) -> bool:
    """Whether no character is half of one, which no answer could ever hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
