"""What a request may give as its prompt."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from ddtree.errors import UserError
from ddtree.models.tokenizer import Tokenizer

Prompt = str | Seq[int] | Seq[Mapping[str, Any]]
"""Raw text, token ids, or chat messages for the model's chat template."""


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Token ids of a prompt.

    Raises:
        UserError: it is empty, or holds what is no token.
    """
    if isinstance(prompt, str):
        return checked_ids(tokenizer.encode(prompt), vocab_size, "prompt")
    if len(prompt) and isinstance(prompt[0], Mapping):
        return checked_ids(tokenizer.encode_chat(prompt), vocab_size, "prompt")  # type: ignore[arg-type]
    return checked_ids(prompt, vocab_size, "prompt")  # type: ignore[arg-type]


def checked_ids(ids: Seq[int], vocab_size: int, what: str) -> list[int]:
    """``ids`` as a list, if each is a token.

    Raises:
        UserError: there is none, or one is no token.
    """
    if not len(ids):
        raise UserError(f"the {what} is empty", "give at least one token")
    are_numbers = set(map(type, ids)) == {int} or all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not are_numbers or not 0 <= min(ids) <= max(ids) < vocab_size:
        raise UserError(f"the {what} holds something that is no token", f"give ids from 0 to {vocab_size - 1}")
    return list(ids)
