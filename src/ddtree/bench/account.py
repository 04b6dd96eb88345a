"""From a streamed answer to a row: what its numbers are, and whether they can be believed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from ddtree.bench.answer import Answer
from ddtree.bench.record import Variant
from ddtree.bench.told import MOST_COUNT, at, count, number

_SLACK_TOKENS = 4
_SLACK_SHARE = 0.1


@dataclass(frozen=True)
class Drafting:
    """How the engine says that it drafted. Lengths are tokens that each round committed."""

    mode: str | None = None
    budget: int | str | None = None
    rounds: int | None = None
    tau: float | None = None
    accepted_lengths: list[int] | None = None
    notes: list[str] = field(default_factory=list)


def drafting(answer: Answer) -> Drafting:
    """Read the account of whichever engine answered; empty where it gives none, or one that cannot be read."""
    told = answer.told
    try:
        if own := told.get("ddtree"):
            lengths = [count(length) for length in own["accepted_lengths"]]
            return Drafting(
                mode=str(own["mode"]),
                budget=_budget(own["budget"]),
                rounds=len(lengths),
                tau=round(sum(lengths) / len(lengths), 4) if lengths else None,
                accepted_lengths=lengths,
                notes=[str(note) for note in own.get("notes", [])],
            )
        if (meta := told.get("meta_info")) and meta.get("spec_verify_ct"):
            rounds, tau = count(meta["spec_verify_ct"]), number(meta["spec_accept_length"])
            if 0 <= tau < MOST_COUNT:
                return Drafting(rounds=rounds, tau=round(tau, 4))
        if spec := (told.get("metrics") or {}).get("speculative_decoding"):
            rounds, accepted = count(spec["num_drafts"]), count(spec["num_accepted_tokens"])
            return Drafting(rounds=rounds, tau=round(1 + accepted / rounds, 4) if rounds else None)
    except (AttributeError, KeyError, TypeError, ValueError):
        return Drafting()
    return Drafting()


def cached_tokens(usage: dict[str, Any]) -> int | None:
    """How many of the prompt's tokens came from a cache; None where that is not told, or cannot be."""
    try:
        cached = count(at(usage, "prompt_tokens_details", "cached_tokens"))
        return cached if cached <= count(at(usage, "prompt_tokens")) else None
    except ValueError:
        return None


def check(answer: Answer, variant: Variant, max_tokens: int) -> None:
    """Turn an answer that contradicts itself into an error, so that it spoils no number.

    What can be told from the stream alone: usage is there and whole; it is not less than the events with text (a token
    is never split over events), not more than the bytes of text can hold, nor than was asked for; the engine's rounds
    add up to it; the answer was drafted as asked.
    """
    if answer.error_kind is not None:
        return
    if answer.finish_reason is None:
        return answer.fail("broken_stream", "no finish reason came")
    usage = answer.usage
    if usage is None:
        return answer.fail("usage_missing", "the stream has no usage")
    tokens, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
    if not isinstance(tokens, int) or not _is_count(tokens) or not _is_count(prompt) or prompt == 0:
        return answer.fail("usage_wrong", f"usage says {prompt!r} prompt and {tokens!r} completion tokens")
    if not answer.chunk_ms:
        return answer.fail("empty", f"no text came, usage says {tokens} tokens")
    text_bytes = len(answer.text.encode("utf-8", "replace"))
    if tokens < len(answer.chunk_ms):
        return answer.fail("usage_wrong", f"{len(answer.chunk_ms)} events with text, usage says {tokens} tokens")
    if tokens > max_tokens:
        return answer.fail("usage_wrong", f"{max_tokens} tokens were asked for, usage says {tokens}")
    if answer.finish_reason == "stop" and tokens > text_bytes + _SLACK_TOKENS:
        return answer.fail("usage_wrong", f"{text_bytes} bytes of text came, usage says {tokens} tokens")
    own = drafting(answer)
    if own.accepted_lengths is not None and own.accepted_lengths and sum(own.accepted_lengths) + 1 != tokens:
        rounds = sum(own.accepted_lengths) + 1
        return answer.fail("usage_wrong", f"the rounds gave {rounds} tokens, usage says {tokens}")
    if own.mode is not None and not _as_asked(own, variant):
        return answer.fail("not_as_asked", f"asked for {variant.name}, got {own.mode} with budget {own.budget}")
    return None


def recount(answer: Answer, counted: int, ignores_eos: bool) -> None:
    """Hold usage against ``counted``, the tokens of the answer's text by the server's own tokenizer.

    They differ a little in honest answers: the end token has no text, and a text can be cut into tokens in several
    ways. With ``ignores_eos`` special tokens may stand inside the answer, so only too small a usage is seen.
    """
    if answer.error_kind is not None or answer.usage is None or "�" in answer.text:
        return
    tokens = int(answer.usage["completion_tokens"])
    slack = _SLACK_TOKENS + _SLACK_SHARE * max(tokens, counted)
    if counted - tokens > slack or (tokens - counted > slack and not ignores_eos):
        answer.fail("usage_wrong", f"the text has {counted} tokens, usage says {tokens}")


def digest(content: Any) -> str:
    """SHA-256 of text, or of a request's messages."""
    told = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return hashlib.sha256(told.encode("utf-8", "replace")).hexdigest()


def _is_count(value: Any) -> bool:
    try:
        return count(value) == value
    except ValueError:
        return False


def _budget(value: Any) -> int | str | None:
    return value if value is None or isinstance(value, str) else count(value)


def _as_asked(own: Drafting, variant: Variant) -> bool:
    if variant.mode == "server":
        return True
    if own.mode != variant.mode:
        return False
    return variant.budget is None or variant.mode == "ar" or own.budget == variant.budget
