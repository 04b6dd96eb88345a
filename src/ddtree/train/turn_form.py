"""What stands before and after the words of a user's only turn, and the tokens that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.errors import UserError
from ddtree.models.tokenizer import Tokenizer

_PROBES = ("alpha beta", "Gamma 7")


@dataclass(frozen=True)
class TurnForm:
    """The text around a user's turn; nothing where the target has no chat template and is not asked to chat."""

    tokenizer: Tokenizer
    before: str
    after: str
    is_chat: bool

    def begin(self, openings: Sequence[str]) -> list[list[int]]:
        """Token ids of turns that have only begun, each for one opening, which may be empty."""
        if not self.is_chat:
            return [self.tokenizer.encode(opening) for opening in openings]
        return self.tokenizer.encode_rendered([self.before + opening for opening in openings])

    def end(self, ending: str) -> list[int]:
        """Token ids that follow a turn's own words: its ending, and what the template adds up to the answer."""
        first, whole = self.tokenizer.encode_rendered([_PROBES[0], _PROBES[0] + ending + self.after])
        if whole[: len(first)] == first:
            return whole[len(first) :]
        return self.tokenizer.encode_rendered([ending + self.after])[0]


def read_turn_form(tokenizer: Tokenizer, *, chat: bool) -> TurnForm:
    """The form that the model's chat template gives a turn.

    Raises:
        UserError: there is no template, or it writes turns otherwise than between two fixed texts.
    """
    if not chat:
        return TurnForm(tokenizer, "", "", is_chat=False)
    rendered = [tokenizer.chat_text([{"role": "user", "content": probe}]) for probe in _PROBES]
    before, found, after = rendered[0].partition(_PROBES[0])
    if not found or rendered[1] != before + _PROBES[1] + after or not after:
        raise UserError(
            "this model's chat template rewrites what the user says, so that a turn cannot be left for it to complete",
            "give --self-prompt-share 0",
        )
    return TurnForm(tokenizer, before, after, is_chat=True)
