"""The target's tokenizer and chat template, from its Hugging Face folder."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ddtree.errors import UserError


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

    def encode(self, text: str) -> list[int]:
        """Tokens of raw text, with the model's own opening token if it has one.

        Raises:
            UserError: the text holds half of a character.
        """
        _check_unicode(text)
        return list(self._hf(text).input_ids)

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

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Tokens of a conversation in the model's chat template, up to where the answer begins.

        Args:
            variables: more variables for the template, of those that `template_variables` names.

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
        return list(self._hf(text, add_special_tokens=False).input_ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of tokens."""
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

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is still open."""
        self._ids.append(token_id)
        return self._advance(final=False)

    def finish(self) -> str:
        """What was held back."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._told])
        after = self._tokenizer.decode(self._ids[self._start :])
        if not final and after.endswith("\ufffd"):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return after[len(before) :]
