"""Which conversations there are: an endless row of draws that follows from the request alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ddtree.train.data_facts import DataAsked
from ddtree.train.draws import Draw
from ddtree.train.prompt_pool import PromptPool, n_words, opening_of
from ddtree.train.turn_form import TurnForm

MOST_OPENING_WORDS = 24


@dataclass(frozen=True)
class _Roll:
    """What the dice say of one conversation; ``opening`` is None where its prompt is given."""

    where: int
    index: int
    opening: str | None
    temperature: float
    turn_temperature: float
    seed: int


class DrawPlan:
    """Plans draws one after the other; equal requests give equal plans.

    A given prompt is worth one greedy answer. Where its file has had one for all its prompts, the target completes an
    opening instead, or samples where it is not to prompt itself.

    Args:
        form: how the target's own turns begin; None where it completes none.
        ending_tokens: for each source, the length of what follows such a turn; 0 where nothing does.
    """

    def __init__(self, asked: DataAsked, pool: PromptPool, form: TurnForm | None, ending_tokens: Sequence[int]) -> None:
        self._asked, self._pool, self._form, self._ending_tokens = asked, pool, form, ending_tokens
        self._dice = np.random.default_rng(asked.seed)
        total = sum(source.facts.weight for source in pool.sources)
        self._edges = [edge / total for edge in accumulate(source.facts.weight for source in pool.sources)]
        self._orders = [self._dice.permutation(len(source.prompts)) for source in pool.sources]
        self._n_greedy, self._n_sampled = ([0] * len(pool.sources) for _ in range(2))
        self._n_words = [[n_words(subject) for subject in source.subjects] for source in pool.sources]
        self._planned = 0

    @property
    def sources(self) -> list[str]:
        """Names of where prompts come from: each file, and openings of its prompts."""
        names = [source.name for source in self._pool.sources]
        return names if self._form is None else [*names, *(f"{name}, completed by the target" for name in names)]

    def skip(self, n: int) -> None:
        """Pass over draws that were made before."""
        for _ in range(n):
            self._roll()

    def take(self, n: int) -> list[Draw]:
        """The next draws."""
        first = self._planned
        rolled = [self._roll() for _ in range(n)]
        begun: dict[int, list[int]] = {}
        openings = [(i, roll.opening) for i, roll in enumerate(rolled) if roll.opening is not None]
        if openings and self._form is not None:
            begun = dict(zip((i for i, _ in openings), self._form.begin([text for _, text in openings]), strict=True))
        return [self._draw(first + i, roll, begun.get(i)) for i, roll in enumerate(rolled)]

    def _roll(self) -> _Roll:
        dice, asked = self._dice, self._asked
        self._planned += 1
        where = int(np.searchsorted(self._edges, dice.random(), side="right").clip(max=len(self._edges) - 1))
        is_greedy = bool(dice.random() < asked.greedy_share)
        completes = bool(dice.random() < asked.self_prompt_share)
        low, high = asked.temperature_low, asked.temperature_high
        temperature, turn_temperature = dice.uniform(low, high, 2).tolist()
        seed = int(dice.integers(2**63 - 1))
        pick, words = dice.random(2).tolist()
        n_prompts = len(self._orders[where])
        if is_greedy and not completes and self._n_greedy[where] == n_prompts:
            completes, is_greedy = (True, True) if asked.self_prompt_share else (False, False)
        opening = None
        if completes:
            index = int(pick * n_prompts)
            subject = self._pool.sources[where].subjects[index]
            most = min(MOST_OPENING_WORDS, max(self._n_words[where][index] - 1, 0))
            opening = self._pool.sources[where].beginning + opening_of(subject, int(words * (most + 1)))
        else:
            count = self._n_greedy if is_greedy else self._n_sampled
            index = int(self._orders[where][count[where] % n_prompts])
            count[where] += 1
        return _Roll(where, index, opening, 0.0 if is_greedy else temperature, turn_temperature, seed)

    def _draw(self, number: int, roll: _Roll, begun: list[int] | None) -> Draw:
        source = self._pool.sources[roll.where]
        where, ending, tokens = roll.where, None, source.prompts[roll.index]
        if begun is not None:
            where += len(self._pool.sources)
            n_after = self._ending_tokens[roll.where]
            ending = roll.where if n_after else None
            # Without an opening token of its own, raw text cannot begin with nothing.
            tokens = begun[: self._asked.max_prompt_tokens - n_after] or tokens[:1]
        return Draw(number, where, tokens, ending, roll.temperature, roll.turn_temperature, roll.seed)
