"""Are long prompts answered, and does speculation survive them: beyond the draft window, and on a warm prefix cache?"""

from __future__ import annotations

from collections.abc import Iterator

from ddtree.verify.answer import Answer, Order
from ddtree.verify.effective import Counters
from ddtree.verify.finding import Finding, proven, unknown, violated
from ddtree.verify.probes.speculation import ONE, acceptance_length
from ddtree.verify.prompts import long_text
from ddtree.verify.session import Session

_ANSWER_TOKENS = 48
_SHARE = 0.6
_SLOWEST_PREFILL_TOK_S = 100


def probe_long_context(session: Session) -> Iterator[Finding]:
    """A prompt of the options' length, or of most of the context, asked twice. Raises CheckFailed."""
    context = session.effective.settings.get("context_length")
    wanted = session.options.long_tokens
    if isinstance(context, int):
        wanted = min(wanted, int(context * _SHARE), context - _ANSWER_TOKENS - 8)
    if wanted < 32:
        why = "left out by --long-tokens 0" if session.options.long_tokens == 0 else f"the context has {context} tokens"
        yield unknown("long context", "long prompts are answered", why, is_required=False)
        return
    per_token = _characters_per_token(session)
    prompt = long_text(int(wanted * per_token))
    timeout_s = session.options.answer_timeout_s + wanted / _SLOWEST_PREFILL_TOK_S
    cold, cold_moved = _ask(session, prompt, timeout_s)
    warm, warm_moved = _ask(session, prompt, timeout_s)
    claim = f"a prompt of {cold.prompt_tokens} tokens is answered"
    seen = f"{cold.completion_tokens} tokens in {cold.seconds:.1f} s, again in {warm.seconds:.1f} s"
    if not 0.5 * wanted <= cold.prompt_tokens <= 1.5 * wanted + 16:
        yield violated(
            "long context",
            f"a prompt of about {wanted} tokens is read in whole",
            f"usage tells {cold.prompt_tokens} prompt tokens",
            remedy="something cuts prompts: look for a truncation setting",
        )
        return
    if cold.completion_tokens < 1:
        yield violated("long context", claim, "the answer is empty", remedy="look into the server's log")
        return
    yield proven("long context", claim, seen)
    if session.expectation.speculates == "none":
        return
    yield _survives(cold, cold_moved, warm, warm_moved)


def _survives(cold: Answer, cold_moved: Counters, warm: Answer, warm_moved: Counters) -> Finding:
    claim = "drafts are still accepted after a long prompt, also from a warm cache"
    taus = [acceptance_length([cold], cold.rounds, cold_moved), acceptance_length([warm], warm.rounds, warm_moved)]
    if taus[0] is None or taus[1] is None:
        return unknown("long context", claim, "committed tokens per verify call cannot be told", is_required=False)
    first, again = taus[0], taus[1]
    seen = f"tau {first:.2f}, from a warm cache {again:.2f}"
    if first <= ONE:
        remedy = "the drafter's window or sliding layers are run wrongly, or its positions end before the target's"
        return violated("long context", claim, seen, remedy=remedy)
    if again <= ONE or again < first / 2:
        remedy = "a prefix-cache hit leaves the drafter's context unwritten: switch the prefix cache off"
        return violated("long context", claim, seen, remedy=remedy)
    return proven("long context", claim, seen)


def _ask(session: Session, prompt: str, timeout_s: float) -> tuple[Answer, Counters]:
    before = session.adapter.counters()
    answer = session.adapter.answer(Order(prompt, _ANSWER_TOKENS), timeout_s)
    return answer, session.moved_since(before, answer.completion_tokens)


def _characters_per_token(session: Session) -> float:
    """Measured on this tokenizer, with texts of the same kind."""
    short, longer = long_text(200), long_text(800)
    tokens = [session.adapter.answer(Order(text, 1)).prompt_tokens for text in (short, longer)]
    return (len(longer) - len(short)) / max(1, tokens[1] - tokens[0])
