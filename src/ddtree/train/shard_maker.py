"""From finished conversations, which come in any order, to shards in the order of their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.models.tokenizer import Tokenizer
from ddtree.train.data_facts import DataAsked, DataFacts, ShardFacts
from ddtree.train.draws import Written
from ddtree.train.loops import loop_ends
from ddtree.train.overlap import EvaluationText
from ddtree.train.shards import Conversation, ShardWriter


@dataclass(frozen=True)
class _Judged:
    """A conversation to keep, or the fault for which it is left out."""

    draw: int
    kept: Conversation | None
    fault: str | None
    is_cut: bool


class ShardMaker:
    """Filters what the target wrote, and stores a shard as soon as all its conversations are there.

    Args:
        answer_enders: tokens that end an answer; one that holds nothing else is left out.
    """

    def __init__(
        self, writer: ShardWriter, tokenizer: Tokenizer, evaluation: EvaluationText, answer_enders: frozenset[int]
    ) -> None:
        self._writer, self._tokenizer, self._evaluation = writer, tokenizer, evaluation
        self._enders = answer_enders
        self._open: dict[int, list[_Judged]] = {}

    @property
    def facts(self) -> DataFacts:
        """What is stored."""
        return self._writer.facts

    @property
    def asked(self) -> DataAsked:
        """What was asked for."""
        return self.facts.asked

    @property
    def n_stored_draws(self) -> int:
        """Draws of the shards that are stored."""
        return len(self.facts.shards) * self.asked.shard_draws

    @property
    def n_answer_tokens(self) -> int:
        """Answer tokens of the shards that are stored."""
        return self.facts.n_answer_tokens

    @property
    def is_enough(self) -> bool:
        """Whether all that was asked for is stored."""
        return self.n_answer_tokens >= self.asked.answer_tokens

    def add(self, written: Sequence[Written]) -> None:
        """Take finished conversations in; shards that they complete are stored, as far as they are wanted.

        Raises:
            UserError: the disk is full or cannot be written.
        """
        for judged in self._judge(written):
            self._open.setdefault(judged.draw // self.asked.shard_draws, []).append(judged)
        while not self.is_enough:
            ready = self._open.get(len(self.facts.shards), [])
            if len(ready) < self.asked.shard_draws:
                return
            del self._open[len(self.facts.shards)]
            self._store(sorted(ready, key=lambda judged: judged.draw))

    def _judge(self, written: Sequence[Written]) -> list[_Judged]:
        answers = [w.tokens[w.answer_start :] for w in written]
        ends = [None] * len(answers) if self.asked.loops == "keep" else loop_ends(answers)
        return [self._judged(w, end) for w, end in zip(written, ends, strict=True)]

    def _judged(self, written: Written, loop_end: int | None) -> _Judged:
        draw, start, tokens = written.draw, written.answer_start, written.tokens
        if loop_end is not None and self.asked.loops == "drop":
            return _Judged(draw.number, None, "loop", False)
        if all(int(token) in self._enders for token in tokens[start:]):
            return _Judged(draw.number, None, "empty answer", False)
        if loop_end is not None:
            tokens = tokens[: start + loop_end]
        if self._evaluation.shared(self._tokenizer.decode([int(token) for token in tokens])):
            return _Judged(draw.number, None, "shares 13 words with an evaluation prompt", False)
        kept = Conversation(draw.number, draw.source, tokens, start, draw.temperature == 0)
        return _Judged(draw.number, kept, None, loop_end is not None)

    def _store(self, judged: Sequence[_Judged]) -> None:
        kept = [j.kept for j in judged if j.kept is not None]
        sources = self.facts.sources
        facts = ShardFacts(
            n_draws=len(judged),
            n_conversations=len(kept),
            n_greedy=sum(c.is_greedy for c in kept),
            n_tokens=sum(len(c.tokens) for c in kept),
            n_answer_tokens=sum(len(c.tokens) - c.answer_start for c in kept),
            n_by_source=dict(Counter(sources[c.source] for c in kept)),
            n_cut=sum(j.is_cut for j in judged),
            n_left_out=dict(Counter(j.fault for j in judged if j.fault is not None)),
        )
        self._writer.add(kept, facts)
