"""A request on its way: its tokens, and where they end."""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice

from ddtree.engine.budget_policy import Outlook
from ddtree.engine.completion import Completion, FinishReason, RoundStats, TracedTree
from ddtree.engine.constraint import Constraint
from ddtree.engine.logprobs import TokenLogprob, read_logprobs
from ddtree.engine.sampling_params import SamplingParams
from ddtree.engine.speculation import DraftShape
from ddtree.models.tokenizer import TextStream, Tokenizer


@dataclass(eq=False)
class Sequence:
    """Host side of one request.

    Attributes:
        prompt: token ids.
        end_token_ids: tokens that end the answer.
        token_limit: prompt and answer together have at most so many tokens.
        shape: how its rounds draft.
        prefix_keys: keys of the prompt's full pages in the `PrefixCache`.
        prefilled: prompt tokens committed so far.
        committed: tokens whose keys and values are cached.
        drafted: tokens whose context the drafter has in its cache.
        is_sound: its pages hold what they should; false after a fault.
        output: generated tokens, as cut by the stop.
        logprobs: of the generated tokens, where they are wanted.
        constraint: rules that the answer follows.
        vocab_size: of the target; needed for log-probabilities.
        outlook: what the budget policy expects of it.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int
    end_token_ids: frozenset[int]
    token_limit: int
    shape: DraftShape
    tokenizer: Tokenizer
    vocab_size: int = 0
    record_trees: bool = False
    notes: list[str] = field(default_factory=list)
    constraint: Constraint | None = None
    arrived: float = field(default_factory=time.perf_counter)
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    prefix_keys: list[bytes] = field(default_factory=list)
    prefilled: int = 0
    committed: int = 0
    drafted: int = 0
    is_sound: bool = True
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    trees: list[TracedTree] = field(default_factory=list)
    outlook: Outlook = field(default_factory=Outlook)
    stats: RoundStats = field(init=False)

    def __post_init__(self) -> None:
        self.stats = RoundStats(self.shape.mode, "auto" if self.shape.is_auto else self.shape.budget, self.notes)
        self._stream = TextStream(self.tokenizer)
        self._stop = StopStrings(self.params.stop)
        self._text = ""
        self._unread: list[int] = []

    @property
    def text(self) -> str:
        """Text of the generated tokens, as cut by a stop string; made when it is asked for."""
        self._read()
        return self._text

    def _read(self) -> None:
        if self._unread:
            self._text += self._stop.push(self._stream.push(*self._unread))
            self._unread.clear()

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled == len(self.prompt)

    def extend(self, tokens: Seq[int], told_logprobs: Seq[int] = ()) -> int:
        """Take committed tokens in order, up to the first stop among them.

        A token is held against the end tokens first, then its text against the stop strings, then the count against the
        limit, so that nothing that comes after a stop can leak.

        Args:
            told_logprobs: what `ddtree.engine.logprobs.tell_logprobs` said of them, where it was asked.

        Returns:
            how many were taken.
        """
        taken, told = 0, self._read_logprobs(tokens, told_logprobs)
        for piece in self._pieces(tokens):
            taken += len(piece)
            self.logprobs += islice(told, len(piece))
            self.output += piece
            is_end = piece[-1] in self.end_token_ids
            self._unread += piece[:-1] if is_end else piece
            if is_end or self._ends_with(piece[-1]):
                self._finish("stop")
            elif len(self.prompt) + len(self.output) >= self.token_limit:
                self._finish("length")
            if self.finish_reason:
                break
        return taken

    def _ends_with(self, token: int) -> bool:
        """Whether a token that is none of the end tokens completes a stop string or what the constraint wants."""
        is_complete = False
        if self.constraint is not None:
            self.constraint.advance(token)
            is_complete = self.constraint.is_complete
        if self.params.stop:
            self._read()
        return is_complete or self._stop.found

    def _pieces(self, tokens: Seq[int]) -> Iterator[Seq[int]]:
        """Tokens in stretches that can hold a stop at their end only; one by one where each token's text may be one."""
        if self.params.stop or self.constraint is not None:
            return ([token] for token in tokens)
        room = self.token_limit - len(self.prompt) - len(self.output)
        end = next((n for n, token in enumerate(tokens, 1) if token in self.end_token_ids), len(tokens))
        return iter([tokens[: min(end, room)]])

    def _read_logprobs(self, tokens: Seq[int], told_logprobs: Seq[int]) -> Iterator[TokenLogprob]:
        if self.params.logprobs is None:
            return iter(())
        return read_logprobs(told_logprobs, tokens, self.params.logprobs, self.vocab_size)

    def _finish(self, reason: FinishReason) -> None:
        text = self.text
        if not self._stop.found:
            text += self._stop.push(self._stream.finish())
        self.finish_reason = "stop" if self._stop.found else reason
        self._text = text if self._stop.found else text + self._stop.held

    def completion(self) -> Completion:
        """The answer, once it is finished."""
        assert self.finish_reason is not None
        return Completion(
            self.text, self.output, len(self.prompt), self.finish_reason, self.stats, self.trees, self.logprobs
        )


class StopStrings:
    """Looks for stop strings in text that comes piece by piece.

    Attributes:
        found: a stop string was seen; everything from it on is dropped.
        held: text that could still be the beginning of a stop string.
    """

    def __init__(self, stops: Seq[str]) -> None:
        self._stops = tuple(stops)
        self.found = False
        self.held = ""

    def push(self, piece: str) -> str:
        """Text that is now certain to stand before any stop string."""
        text = self.held + piece
        hits = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if hits:
            self.found, self.held = True, ""
            return text[: min(hits)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest beginning of ``stop`` that ends ``text``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
