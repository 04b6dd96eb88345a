"""Keeping evaluation prompts out of training text: no 13 words in a row may be shared.

Words are runs of letters and digits, in lower case; what stands between them does not count. Thirteen in a row is the
measure of GPT-3 (arXiv 2005.14165, appendix C). A prompt of fewer words counts as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

GRAM_WORDS = 13
_WORD = re.compile(r"[^\W_]+")


def words_of(text: str) -> list[str]:
    """Words in lower case, without punctuation."""
    return _WORD.findall(text.lower())


class EvaluationText:
    """What evaluation prompts say.

    Args:
        prompts: their texts.
        allowed: fixed sentences that prompts may share with training text, such as an instruction that all rows of a
            benchmark end with. A stretch of words that takes in one of them is not held against anyone.
    """

    def __init__(self, prompts: Iterable[str], allowed: Iterable[str] = ()) -> None:
        self._grams: dict[int, set[tuple[str, ...]]] = {}
        frames = [frame for sentence in allowed if (frame := words_of(sentence))]
        for prompt in prompts:
            for words in _without(words_of(prompt), frames):
                size = min(GRAM_WORDS, len(words))
                for i in range(len(words) - size + 1):
                    self._grams.setdefault(size, set()).add(tuple(words[i : i + size]))
        self._known = {word for grams in self._grams.values() for gram in grams for word in gram}

    def shared(self, text: str) -> str | None:
        """The first words that a text shares with an evaluation prompt, or None.

        A prompt of fewer than 13 words is found as those very words in a row, if it has at least six: fewer say little.
        """
        words = words_of(text)
        at = 0
        while at < len(words):
            end = at
            while end < len(words) and words[end] in self._known:
                end += 1
            for size, grams in self._grams.items():
                if size < _LEAST_WORDS:
                    continue
                for i in range(at, end - size + 1):
                    if (gram := tuple(words[i : i + size])) in grams:
                        return " ".join(gram)
            at = end + 1
        return None


_LEAST_WORDS = 6


def _without(words: list[str], frames: Sequence[list[str]]) -> list[list[str]]:
    """The stretches of words between the frames."""
    stretches: list[list[str]] = [[]]
    at = 0
    while at < len(words):
        frame = next((f for f in frames if words[at : at + len(f)] == f), None)
        if frame is None:
            stretches[-1].append(words[at])
            at += 1
        else:
            stretches.append([])
            at += len(frame)
    return [stretch for stretch in stretches if stretch]
