"""Tries grammars in processes of their own, before the server compiles them.

A hostile schema can keep the grammar library busy for hours, and a thread cannot be stopped from outside, but a process
can.
This file is also the program of those processes, and so imports nothing of ours at its top.
"""

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass

HELPERS = 2
"""Grammars that are tried at the same time; one that takes long holds up no other."""
CPU_LIMIT_S = 2.0
"""Processor time of one grammar. Schemas of people take hundredths of it."""
TIME_LIMIT_S = 10.0
"""The same on the clock, where the processor is busy with other things."""
MEMORY_LIMIT_BYTES = 2**30
STEP_LEXER_FUEL, STEP_MAX_ITEMS = 100_000, 20_000
"""Work of llguidance on one mask: a few milliseconds at most."""
_LONGEST_ERROR = 300


@dataclass(frozen=True)
class Tried:
    """What came of a grammar.

    Attributes:
        complaint: what is wrong with it; empty where it can be compiled in time.
        seconds: processor time that it took.
        is_lasting: the same grammar would fare alike at another time, when the machine has less to do.
    """

    complaint: str
    seconds: float = 0.0
    is_lasting: bool = True


class GrammarProbe:
    """A few helper processes, started when they are needed and again after a grammar that one did not survive."""

    def __init__(self) -> None:
        self._idle: list[Process] = []
        self._turn = asyncio.Semaphore(HELPERS)

    async def tried(self, grammar: str) -> Tried:
        """Whether a grammar can be compiled in time."""
        async with self._turn:
            process = self._idle.pop() if self._idle else await _start()
            try:
                async with asyncio.timeout(TIME_LIMIT_S):
                    tried = await _ask(process, grammar)
            except TimeoutError:
                await _end(process)
                return Tried("it takes too long to compile on this busy machine", is_lasting=False)
            except BaseException:  # its answer would come to somebody else
                await _end(process)
                raise
            if process.returncode is None:
                self._idle.append(process)
            return tried

    async def close(self) -> None:
        """End the processes and see them gone, as the event loop is about to close; nobody may wait for one."""
        while self._idle:
            await _end(self._idle.pop())


async def _start() -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-I", __file__, stdin=PIPE, stdout=PIPE, start_new_session=True
    )


async def _ask(process: Process, grammar: str) -> Tried:
    assert process.stdin and process.stdout
    with contextlib.suppress(ConnectionError):
        process.stdin.write(json.dumps(grammar).encode() + b"\n")
        await process.stdin.drain()
    if line := await process.stdout.readline():
        return Tried(**json.loads(line))
    is_late = await process.wait() == -signal.SIGPROF
    return Tried("it takes too long to compile" if is_late else "it takes too much memory to compile")


async def _end(process: Process) -> None:
    """End a process, whatever it is doing."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(ConnectionError):
        await process.communicate()


def _probe() -> None:
    """The process: one grammar a line in, what came of it a line out."""
    import os
    import resource
    import time

    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    os.nice(5)  # rounds of the engine come first
    # Bytes are enough: what takes long (products of patterns, of divisors) does not depend on the vocabulary.
    vocabulary = LLTokenizer("byte")
    limits = LLParserLimits(step_lexer_fuel=STEP_LEXER_FUEL, step_max_items=STEP_MAX_ITEMS)
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    for line in sys.stdin:
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # its signal ends the process
        grammar = json.loads(line)
        complaint = LLMatcher.validate_grammar(grammar)
        if not complaint or complaint.startswith("WARNING"):
            # Only a matcher builds the lexer, which can go on for ever.
            matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
            complaint = matcher.get_error()
            if not complaint:
                matcher.compute_bitmask()
                complaint = matcher.get_error()
            if complaint.startswith("NoExtension"):
                complaint = "no text fits it: does a $ref lead back to itself?"
        signal.setitimer(signal.ITIMER_PROF, 0)
        told = {
            "complaint": complaint.split("\n", 1)[0][:_LONGEST_ERROR],
            "seconds": round(time.process_time() - began, 4),
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    _probe()
