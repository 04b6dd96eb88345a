"""``ddtree generate``: answer prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree.cli.conversations import Conversation, read_conversations
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
from ddtree.cli.output import ProgressLine, note, print_json

if TYPE_CHECKING:
    from ddtree.engine import Completion, Engine, SamplingParams


def generate(
    pair: PairOptions,
    speculation: SpeculationOptions,
    sampling: SamplingOptions,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="What to answer; may be given several times.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help='One object a line: {"turns": ["...", ...]}.')
    ] = None,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Continue the bare text: no chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object an answer.")] = False,
) -> None:
    """Answer prompts, and say how fast and in how many rounds it went.

    The answers go to stdout, progress and figures to stderr. Several turns of one prompt are asked one after the
    other, each with the answers before it in view.
    """
    conversations = read_conversations(prompt or [], prompts, chat=not no_chat)
    mode = chosen_mode(pair, speculation)
    check_sampling(sampling)
    with ProgressLine() as progress:
        import_engine("generate", progress)
        params = to_sampling_params(sampling)
        engine = load_engine(pair, mode, to_speculation(mode, speculation), progress)
    # A batch at a time, so that what is done is out before the next batch starts.
    for start in range(0, len(conversations), pair.max_batch):
        _answer(engine, conversations[start : start + pair.max_batch], start, params, not no_chat, as_json)


def _answer(
    engine: Engine, batch: list[Conversation], first: int, params: SamplingParams, chat: bool, as_json: bool
) -> None:
    for turn in range(max(len(conversation.turns) for conversation in batch)):
        asked = {index: item for index, item in enumerate(batch, first) if turn < len(item.turns)}
        with ProgressLine() as progress:
            completions = engine.generate(
                [conversation.ask(turn, chat) for conversation in asked.values()], params, on_progress=progress
            )
        for (index, conversation), completion in zip(asked.items(), completions, strict=True):
            conversation.answer(completion.text)
            if as_json:
                print_json({"prompt_index": index, "turn": turn} | completion_row(completion))
            else:
                print(completion.text, flush=True)
                note(summary(completion))
            for remark in completion.stats.notes:
                note(f"note: {remark}")


def completion_row(completion: Completion) -> dict[str, Any]:
    """The fields that ``--json`` prints of an answer."""
    stats = completion.stats
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(completion.token_ids),
            "total_tokens": completion.prompt_tokens + len(completion.token_ids),
        },
        "mode": stats.mode,
        "budget": stats.budget,
        "tau": stats.tau,
        "accepted_lengths": list(stats.accepted_lengths),
        "rounds": stats.rounds,
        "decode_tok_s": stats.decode_tok_s,
        "ttft_ms": stats.ttft_ms,
        "notes": list(stats.notes),
    }


def summary(completion: Completion) -> str:
    """One line on how an answer came about."""
    stats = completion.stats
    how = stats.mode if stats.mode == "ar" else f"{stats.mode}, budget {stats.budget}, tau {stats.tau:.2f}"
    cut = ", cut at the limit" if completion.finish_reason == "length" else ""
    return f"[{len(completion.token_ids)} tokens{cut}; {stats.decode_tok_s:.1f} tok/s; {how}]"
