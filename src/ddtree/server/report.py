"""What every response says about how it came about: usage, and our `ddtree` field."""

from collections.abc import Sequence
from typing import Any

from ddtree.engine import Completion


def usage(prompt_lengths: Sequence[int], completions: Sequence[Completion]) -> dict[str, Any]:
    """Tokens as OpenAI counts them: a prompt once however many answers it got; end tokens are generated tokens.

    What of a prompt was cached is what its first answer found, as the others may have found that one's work.
    """
    generated = sum(len(completion.token_ids) for completion in completions)
    prompt_tokens, choices = sum(prompt_lengths), len(completions) // len(prompt_lengths)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": sum(c.stats.cached_tokens for c in completions[::choices])},
    }


def usage_so_far(prompt_lengths: Sequence[int], generated: int) -> dict[str, Any]:
    """In the middle of a stream, when ``generated`` tokens of all its answers have been written."""
    prompt_tokens = sum(prompt_lengths)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
    }


def ddtree_stats(completions: Sequence[Completion]) -> dict[str, Any]:
    """How the answers were drafted; all of a request's answers are drafted alike.

    ``accepted_lengths`` and ``round_budgets`` have the rounds of all answers one after the other, ``rounds_by_choice``
    says where to cut them.
    """
    stats = [completion.stats for completion in completions]
    lengths = [length for each in stats for length in each.accepted_lengths]
    return {
        "mode": stats[0].mode,
        "budget": stats[0].budget,
        "tau": round(sum(lengths) / len(lengths), 4) if lengths else None,
        "rounds": len(lengths),
        "rounds_by_choice": [each.rounds for each in stats],
        "accepted_lengths": lengths,
        "round_budgets": [budget for each in stats for budget in each.round_budgets],
        "ttft_ms": round(min(each.ttft_ms for each in stats), 3),
        "decode_tok_s": round(sum(each.decode_tok_s for each in stats), 2),
        "notes": list(dict.fromkeys(note for each in stats for note in each.notes)),
    }
