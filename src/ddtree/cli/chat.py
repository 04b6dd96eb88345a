"""``ddtree chat``: talk with a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ddtree.cli.generate import summary
from ddtree.cli.loading import import_engine, load_engine
from ddtree.cli.options import (
    PairOptions,
    SamplingOptions,
    SpeculationOptions,
    check_sampling,
    chosen_mode,
    to_sampling_params,
    to_speculation,
)
from ddtree.cli.output import ProgressLine, note
from ddtree.errors import UserError

if TYPE_CHECKING:
    from ddtree.engine import Engine, SamplingParams


def chat(pair: PairOptions, speculation: SpeculationOptions, sampling: SamplingOptions) -> None:
    """Talk with a model; answers appear as they are written.

    An empty line does nothing, /new forgets the conversation, /exit or the end of the input leaves.
    """
    mode = chosen_mode(pair, speculation)
    check_sampling(sampling)
    with ProgressLine() as progress:
        import_engine("chat", progress)
        params = to_sampling_params(sampling)
        engine = load_engine(pair, mode, to_speculation(mode, speculation), progress, prefix_cache=True)
    at_terminal = sys.stdin.isatty()
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # the tokenizer refuses bytes that are not text
    if at_terminal:
        note("/new forgets the conversation, /exit leaves")
    messages: list[dict[str, str]] = []
    while (line := _read_line(at_terminal)) is not None and line != "/exit":
        if line == "/new":
            messages.clear()
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": _say(engine, messages, params)})
            except UserError as error:
                if not at_terminal:
                    raise
                messages.pop()
                note(f"{error} (or type /new)")


def _read_line(at_terminal: bool) -> str | None:
    """The next input line without its blanks; None at the end."""
    if at_terminal:
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


def _say(engine: Engine, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print the answer to ``messages`` piece by piece and return it."""
    for event in engine.stream(list(messages), params):
        print(event.text, end="", flush=True)
        if event.completion is not None:
            print(flush=True)
            note(summary(event.completion))
            for remark in event.completion.stats.notes:
                note(f"note: {remark}")
            return event.completion.text
    raise RuntimeError("the stream ended without a completion")
