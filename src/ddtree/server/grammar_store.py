"""Compiled grammars of one server; each is tried apart before it is compiled here."""

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Any

from ddtree.engine import Engine
from ddtree.errors import UserError
from ddtree.server.api_error import ApiError
from ddtree.server.grammar import Grammar, GrammarCompiler, json_grammar
from ddtree.server.grammar_probe import GrammarProbe, Tried

KEPT = 64
"""Grammars, and refusals, that are kept for the next request with the same schema."""
MOST_WAITING = 32
"""Grammars that may wait to be tried; more are refused with 429."""
KEPT_SECONDS = 5.0
"""Processor time that all kept grammars took to compile: bounds their memory, which is at most 100 MiB a second."""


@dataclass(frozen=True)
class _Known:
    """A grammar, or why there is none; see `Tried`."""

    grammar: Grammar | None
    tried: Tried


class GrammarStore:
    """Grammars by their text, the least recently used forgotten first."""

    def __init__(self) -> None:
        self._probe = GrammarProbe()
        self._compiler: GrammarCompiler | None = None
        self._known: dict[bytes, _Known] = {}
        self._under_way: dict[bytes, asyncio.Task[_Known]] = {}

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
            ApiError: 429 where too many wait.
        """
        name = hashlib.sha256(text.encode()).digest()
        known = self._known.pop(name, None)
        if known is None:
            if (task := self._under_way.get(name)) is None:
                if len(self._under_way) >= MOST_WAITING:
                    raise ApiError(
                        429, f"{MOST_WAITING} schemas wait to be compiled", code="queue_full", retry_after_s=2
                    )
                task = self._under_way[name] = asyncio.create_task(self._learn(engine, text))
                task.add_done_callback(lambda _: self._under_way.pop(name))
            known = await asyncio.shield(task)  # others may wait for the same
        if known.tried.is_lasting:
            self._keep(name, known)
        if known.grammar is None:
            raise UserError(f"the schema cannot be used ({known.tried.complaint})")
        return known.grammar

    async def _learn(self, engine: Engine, text: str) -> _Known:
        tried = await self._probe.tried(text)
        if tried.complaint:
            return _Known(None, tried)
        if self._compiler is None:
            self._compiler = GrammarCompiler(engine)
        return _Known(await asyncio.to_thread(self._compiler.compile, text), tried)

    def _keep(self, name: bytes, known: _Known) -> None:
        self._known[name] = known
        while len(self._known) > KEPT or sum(k.tried.seconds for k in self._known.values() if k.grammar) > KEPT_SECONDS:
            del self._known[next(iter(self._known))]

    async def close(self) -> None:
        """End the processes that try grammars."""
        under_way = list(self._under_way.values())
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._probe.close()
