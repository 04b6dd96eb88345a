"""Tries grammars in a process of its own, before the server compiles them.

A hostile schema can keep the grammar library busy for hours, and a thread cannot be stopped from outside, but a process
can.
This file is also the program of that process, and so imports nothing of ours at its top.
"""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process

TIME_LIMIT_S = 5
MEMORY_LIMIT_BYTES = 2 * 2**30
STEP_LEXER_FUEL, STEP_MAX_ITEMS = 100_000, 20_000
"""Work of llguidance on one mask: a few milliseconds at most."""
_LONGEST_ERROR = 300


class GrammarProbe:
    """One helper process, started at the first grammar and again after one that it did not survive."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def complaint(self, grammar: str) -> str | None:
        """What is wrong with a grammar; None where it can be compiled in time."""
        async with self._turn:
            try:
                async with asyncio.timeout(TIME_LIMIT_S):
                    return await self._ask(grammar)
            except TimeoutError:
                self.stop()
                return f"it takes more than {TIME_LIMIT_S} s to compile"
            except BaseException:  # its answer would come to somebody else
                self.stop()
                raise

    async def _ask(self, grammar: str) -> str | None:
        process = self._process or await asyncio.create_subprocess_exec(
            sys.executable, "-I", __file__, stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self._process = process
        assert process.stdin and process.stdout
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(grammar).encode() + b"\n")
            await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            self.stop()
            return "it takes too much memory to compile"
        return str(json.loads(line)) or None

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._process = None

    async def close(self) -> None:
        """End the process and see it gone, as the event loop is about to close."""
        process = self._process
        self.stop()
        if process is not None:
            with contextlib.suppress(ConnectionError):
                await process.communicate()


def _probe() -> None:
    """The process: one grammar a line in, one complaint a line out, empty where there is none."""
    import resource

    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    # Bytes are enough: what takes long (products of patterns, of divisors) does not depend on the vocabulary.
    vocabulary = LLTokenizer("byte")
    limits = LLParserLimits(step_lexer_fuel=STEP_LEXER_FUEL, step_max_items=STEP_MAX_ITEMS)
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + 2 * TIME_LIMIT_S  # should nobody be there to end it
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        grammar = json.loads(line)
        complaint = LLMatcher.validate_grammar(grammar)
        if not complaint or complaint.startswith("WARNING"):
            # Only a matcher builds the lexer, which can go on for ever.
            complaint = LLMatcher(vocabulary, grammar, log_level=0, limits=limits).get_error()
        told = complaint.split("\n", 1)[0][:_LONGEST_ERROR]
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    _probe()
