"""The target's tokenizer and chat template, from its Hugging Face folder."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ddtree.errors import UserError

_CHARACTERS_A_TOKEN = 4
"""About what English has; where a text has more, one more look decides."""


class TooManyTokens(UserError):
    """A text is far longer than what it is for."""


class Tokenizer:
    """Text to tokens and back.

    Args:
        folder: Hugging Face folder with the tokenizer's files.
        vocab_size: ids must lie below it.

    Raises:
        UserError: no tokenizer there, or one with more tokens than the model.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        from transformers import AutoTokenizer

        try:
            self._hf = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the library raises many kinds for a damaged or missing file
            raise UserError(
                f"{folder} has no readable tokenizer ({type(error).__name__})", "download the folder again"
            ) from None
        if len(self._hf) > vocab_size:
            raise UserError(
                f"{folder}: the tokenizer has {len(self._hf)} tokens, the model {vocab_size}",
                "the tokenizer belongs to another model: download the folder again",
            )

    def encode(self, text: str, *, is_chat: bool = False, context: int | None = None) -> list[int]:
        """Tokens of text.

        Args:
            is_chat: it comes from `chat_text`, whose template wrote the opening token that raw text still gets.
            context: tokens that the engine takes. A text of far more is refused for its beginning, so that the work is
                bounded by this number and not by the text; one of a few more is the engine's to refuse.

        Raises:
            UserError: the text holds half of a character.
            TooManyTokens: see ``context``.
        """
        _check_unicode(text)
        if context is not None:
            self._refuse_far_longer(text, is_chat, context)
        return self._ids(text, is_chat)

    def _refuse_far_longer(self, text: str, is_chat: bool, context: int) -> None:
        """Try beginnings of the text, each twice as long as the one before.

        A cut changes tokens near its end only; what is refused here has a quarter more than there may be.
        """
        bound = context + context // 4 + 16
        length = _CHARACTERS_A_TOKEN * bound
        while length < len(text):
            if len(self._ids(text[:length], is_chat)) > bound:
                raise TooManyTokens(f"the prompt has more than {bound} tokens, {context} are possible", "shorten it")
            length *= 2

    def _ids(self, text: str, is_chat: bool) -> list[int]:
        return list(self._hf(text, add_special_tokens=not is_chat, verbose=False).input_ids)

    @property
    def chat_template(self) -> str:
        """The model's chat template in Jinja; empty where there is none, or several by name."""
        template = self._hf.chat_template
        return template if isinstance(template, str) else ""

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Variables that the model's chat template reads, beside those that are always set; empty without a template.

        Whoever passes others would find them ignored.
        """
        from jinja2 import TemplateError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = self._hf.chat_template
        if not isinstance(template, str):  # none, or several by name
            return frozenset()
        environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        # transformers' own tag, which only marks which tokens an assistant wrote
        plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)
        try:
            found = meta.find_undeclared_variables(environment.parse(plain))
        except TemplateError:
            return frozenset()
        always = {"messages", "add_generation_prompt", "raise_exception", "strftime_now", "tojson", "namespace"}
        return frozenset(found - always - set(environment.globals) - set(self._hf.special_tokens_map))

    @property
    def n_tokens(self) -> int:
        """Tokens that text can be made of; ids from here on belong to nothing."""
        return len(self._hf)

    @property
    def special_tokens(self) -> dict[int, str]:
        """Special tokens by id."""
        return {i: str(token) for i, token in self._hf.added_tokens_decoder.items() if token.special}

    @property
    def edge_token_ids(self) -> set[int]:
        """Tokens with a meaning of their own to the tokenizer: opening, ending, padding, unknown."""
        ids = (self._hf.bos_token_id, self._hf.eos_token_id, self._hf.pad_token_id, self._hf.unk_token_id)
        return {i for i in ids if i is not None}

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Tokens of a conversation in the model's chat template, up to where the answer begins.

        Args:
            variables: more variables for the template, of those that `template_variables` names.

        Raises:
            UserError: as `chat_text`.
        """
        return self.encode(self.chat_text(messages, variables), is_chat=True)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """The text that `encode_chat` encodes.

        Raises:
            UserError: the model has no chat template, it does not accept the messages, or they hold half of a
                character.
        """
        if not self._hf.chat_template:
            raise UserError("this model has no chat template", "give the prompt raw (--no-chat)")
        if unknown := (variables or {}).keys() - self.template_variables:
            raise UserError(f"the chat template has no variable {', '.join(sorted(unknown))}", "leave it out")
        try:
            text = str(
                self._hf.apply_chat_template(
                    [dict(m) for m in messages], tokenize=False, add_generation_prompt=True, **(variables or {})
                )
            )
        except Exception as error:  # templates raise whatever their author chose
            raise UserError(f"the chat template refuses the messages ({error})", "check roles and contents") from None
        _check_unicode(text)
        return text

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of texts in which the special tokens are written out, as `chat_text` gives them."""
        return [list(ids) for ids in self._hf(list(texts), add_special_tokens=False).input_ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of tokens."""
        if self._hf.is_fast:  # what transformers does before it comes here takes three times as long as the rest
            backend: Any = self._hf.backend_tokenizer
            return str(backend.decode(ids, skip_special_tokens=skip_special_tokens))
        return str(
            self._hf.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    def for_grammars(self, vocab_size: int, end_token_ids: Sequence[int] | None) -> Any:
        """llguidance's table of the same tokens.

        Args:
            vocab_size: tokens of the model, which may be more than the tokenizer has.
            end_token_ids: tokens that end an answer; the tokenizer's own if None.
        """
        from llguidance.hf import from_tokenizer

        fast: Any = self._hf
        return from_tokenizer(
            fast, n_vocab=vocab_size, eos_token=None if end_token_ids is None else list(end_token_ids)
        )

    def token_text(self, token_id: int) -> str:
        """What one token says, special tokens by their name."""
        return self.decode([token_id], skip_special_tokens=False)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("the prompt is not valid Unicode text", "give it in UTF-8, without lone surrogates") from None


class TextStream:
    """Turns tokens into text as they come, holding back characters that are not whole yet."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # first token of the stretch that is decoded anew; what stands before cannot change any more
        self._told = 0  # tokens whose text was given out

    def push(self, *token_ids: int) -> str:
        """The text that these tokens complete; what belongs to a character still open comes later."""
        self._ids += token_ids
        text = self._advance()
        if text is None and len(token_ids) > 1:  # how many of them leave no character open?
            del self._ids[-len(token_ids) :]
            return "".join(map(self.push, token_ids))
        return text or ""

    def finish(self) -> str:
        """What was held back."""
        return self._advance(final=True) or ""

    def _advance(self, final: bool = False) -> str | None:
        """Text that was not given out yet; None while a character is open."""
        after = self._tokenizer.decode(self._ids[self._start :])
        if not final and after.endswith("\ufffd"):
            return None
        before = self._tokenizer.decode(self._ids[self._start : self._told])
        self._start, self._told = self._told, len(self._ids)
        return after[len(before) :]
