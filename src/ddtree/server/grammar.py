"""Grammars for answers: JSON of a schema, kept along every path of a draft tree."""

import threading
import time
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from ddtree.engine import Engine
from ddtree.errors import UserError
from ddtree.models.tokenizer import Tokenizer
from ddtree.server.grammar_probe import STEP_LEXER_FUEL, STEP_MAX_ITEMS

_JSON_STYLE: Any = {
    "lenient": False,  # a keyword that cannot be kept is refused
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n]{0,40}",  # a model that only writes blanks comes to an end
}

_LIMITS = LLParserLimits(step_lexer_fuel=STEP_LEXER_FUEL, step_max_items=STEP_MAX_ITEMS)
MASKS_OF_A_ROUND_S = 1.0
"""A grammar whose masks for one tree take longer holds up everybody, and is given up."""


class Grammar:
    """A grammar for one engine; each answer gets a `GrammarState` of its own."""

    def __init__(self, matcher: LLMatcher, end_token_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher, self._end_token_ids, self._vocab_size = matcher, end_token_ids, vocab_size

    def start(self) -> "GrammarState":
        """The state before the first token."""
        return GrammarState(self._matcher.deep_copy(), self._end_token_ids, self._vocab_size)


class GrammarState:
    """Where one answer stands in its grammar; an `ddtree.engine.constraint.Constraint`.

    Attributes:
        is_complete: nothing more may follow, or the grammar could not be followed any longer.
        fault: why it could not.
    """

    def __init__(self, matcher: LLMatcher, end_token_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher, self._ends, self._words = matcher, end_token_ids, -(-vocab_size // 32)
        self.is_complete = False
        self.fault: str | None = None

    def allowed(self, tokens: Seq[int], parents: Seq[int]) -> NDArray[np.int32]:
        """See `Constraint`. Paths that leave the grammar are not followed: the target cannot take them either."""
        bits = np.full((len(tokens), self._words), -1, dtype=np.int32)
        children: list[list[int]] = [[] for _ in tokens]
        for row in range(1, len(tokens)):
            children[parents[row]].append(row)

        deadline = time.monotonic() + MASKS_OF_A_ROUND_S

        def fill(row: int) -> None:
            if time.monotonic() > deadline:
                self.fault = "it takes too long to follow"
                return
            fill_next_token_bitmask(self._matcher, bits, row)
            for child in children[row]:
                token = tokens[child]
                if token not in self._ends and bits[row, token // 32] >> token % 32 & 1:
                    if not self._matcher.consume_token(token):
                        break
                    fill(child)
                    self._matcher.rollback(1)

        fill(0)
        if self.fault is None and self._matcher.is_error():
            self.fault = _first_line(self._matcher.get_error())
        elif self.fault is None and not bits[0].any():
            self.fault = "no token of this model can go on"
        if self.fault is not None:
            bits[:] = -1  # the answer ends with the next token; the round of the others goes on
        return bits

    def advance(self, token: int) -> None:
        """See `Constraint`."""
        if self.fault is None and not self._matcher.consume_token(token):
            self.fault = _first_line(self._matcher.get_error())
        self.is_complete = self.fault is not None or self._matcher.is_stopped()


class GrammarCompiler:
    """Makes grammars for one model; safe to use from several threads.

    It trusts what it compiles to be compiled in time: see `ddtree.server.grammar_probe`.
    """

    def __init__(self, engine: Engine) -> None:
        self._tokenizer: Tokenizer = engine.tokenizer
        self._vocab_size = engine.target.config.vocab_size
        self._end_token_ids = frozenset(engine.target.config.eos_token_ids)
        self._lock = threading.Lock()

    def compile(self, text: str) -> Grammar:
        """A grammar in llguidance's own notation or in its Lark dialect.

        Raises:
            UserError: it cannot be used.
        """
        matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise UserError(f"the schema cannot be used ({_first_line(matcher.get_error())})")
        return Grammar(matcher, self._end_token_ids, self._vocab_size)

    @property
    def _vocabulary(self) -> LLTokenizer:
        with self._lock:  # takes about a second the first time
            return self._table

    @cached_property
    def _table(self) -> LLTokenizer:
        ends = sorted(self._end_token_ids) or None
        table: LLTokenizer = self._tokenizer.for_grammars(self._vocab_size, ends)
        return table


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of JSON that fits ``schema``.

    Raises:
        UserError: it is no schema.
    """
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_STYLE)
    except ValueError as error:
        raise UserError(f"the schema cannot be used ({error})") from None


def _first_line(text: str) -> str:
    """Of an error, without the parser's inner state."""
    return text.split("\n", 1)[0]
