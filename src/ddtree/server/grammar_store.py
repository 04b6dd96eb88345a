"""Compiled grammars of one server; each is tried apart before it is compiled here."""

import asyncio
from typing import Any

from ddtree.engine import Engine
from ddtree.errors import UserError
from ddtree.server.grammar import Grammar, GrammarCompiler, json_grammar
from ddtree.server.grammar_probe import GrammarProbe

KEPT = 64
"""Grammars that are kept for the next request with the same schema."""


class GrammarStore:
    """Grammars by their text, the least recently used forgotten first."""

    def __init__(self) -> None:
        self._probe = GrammarProbe()
        self._compiler: GrammarCompiler | None = None
        self._kept: dict[str, Grammar] = {}

    async def json_schema(self, engine: Engine, schema: dict[str, Any]) -> Grammar:
        """JSON that fits ``schema``.

        Raises:
            UserError: it is no schema, has keywords that cannot be kept, or takes too much to compile.
        """
        return await self.compiled(engine, json_grammar(schema))

    async def compiled(self, engine: Engine, text: str) -> Grammar:
        """A grammar in llguidance's own notation.

        Raises:
            UserError: a schema in it has keywords that cannot be kept, or it takes too much to compile.
        """
        if (kept := self._kept.pop(text, None)) is None:
            if complaint := await self._probe.complaint(text):
                raise UserError(f"the schema cannot be used ({complaint})")
            if self._compiler is None:
                self._compiler = GrammarCompiler(engine)
            kept = await asyncio.to_thread(self._compiler.compile, text)
        self._kept[text] = kept
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        return kept

    async def close(self) -> None:
        """End the process that tries grammars."""
        await self._probe.close()
