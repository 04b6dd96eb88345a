"""Is speculation really active? The engine's verify counters must move with the answers, and rounds must commit more
than the bonus token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddtree.verify.answer import Answer, Rounds
from ddtree.verify.effective import Counters
from ddtree.verify.expected_tau import Promise, promise_of
from ddtree.verify.finding import Finding, proven, unknown, violated
from ddtree.verify.prompts import speculation_orders
from ddtree.verify.session import Session

ONE = 1.005
"""Up to here an acceptance length counts as 1.00: every round commits its bonus token only."""


def probe_speculation(session: Session) -> Iterator[Finding]:
    """Asks the fixed set one after the other and reads the counters before and after. Raises CheckFailed."""
    orders = speculation_orders(session.options.probe_tokens)
    session.log_before = session.options.log() if session.options.log else ""
    before = session.adapter.counters()
    answers = [session.adapter.answer(order) for order in orders]
    told = joined([answer.rounds for answer in answers if answer.rounds is not None])
    tokens = sum(answer.completion_tokens for answer in answers)
    moved = session.moved_since(before, tokens)
    session.moved = moved
    seen = _seen(answers, told, moved)
    calls = told.count if told is not None else moved.verify_calls
    if session.expectation.speculates == "none":
        yield _off(calls, moved, seen)
        return
    claim = "speculation is active"
    if calls is None:
        yield unknown(
            "speculation",
            claim,
            *seen,
            f"{session.effective.engine} tells neither verify calls of a response nor counters",
            remedy="start SGLang with --enable-metrics; vLLM and ddtree serve tell them always",
        )
        return
    if not calls or moved.verify_calls == 0:
        yield violated(
            "speculation", claim, f"{tokens} tokens came without one verify call", *seen, remedy=_off_remedy(session)
        )
        return
    yield proven("speculation", claim, *seen)
    yield _tau(session, answers, told, moved)
    yield from _budget(session, told, moved)
    if told is not None and told.notes:
        yield violated(
            "speculation",
            "requests run as the server is set",
            *dict.fromkeys(told.notes),
            remedy="lower the setting to what this machine can run, or remove the cause that the note names",
        )


def _off_remedy(session: Session) -> str:
    if session.effective.settings.get("budget") == "auto":
        return (
            "the adaptive budget finds plain decoding faster here (cost_ms in /server_info): give a budget, "
            "or --expect none"
        )
    return (
        "the server decodes one token a step: set the speculation algorithm and drafter, look for a fallback in its log"
    )


def _off(calls: float | None, moved: Counters, seen: Sequence[str]) -> Finding:
    claim = "speculation is off"
    if calls is None and moved.verify_calls is None:
        return unknown("speculation", claim, *seen, "neither responses nor counters tell verify calls")
    if calls or moved.verify_calls:
        remedy = "declare the speculation that runs, or start the server without it"
        return violated("speculation", claim, *seen, remedy=remedy)
    return proven("speculation", claim, *seen)


def joined(each: Sequence[Rounds]) -> Rounds | None:
    if not each:
        return None
    return Rounds(
        sum(rounds.count for rounds in each),
        sum(rounds.committed for rounds in each),
        tuple(budget for rounds in each for budget in rounds.budgets),
        tuple(note for rounds in each for note in rounds.notes),
    )


def _seen(answers: Sequence[Answer], told: Rounds | None, moved: Counters) -> list[str]:
    tokens = sum(answer.completion_tokens for answer in answers)
    seen = [f"{len(answers)} answers of {tokens} tokens"]
    if told is not None:
        seen.append(f"the responses tell {told.count} verify calls")
    if moved.verify_calls is not None:
        seen.append(f"the engine's counter of verify calls moved by {moved.verify_calls:g}")
    return seen


def acceptance_length(answers: Sequence[Answer], told: Rounds | None, moved: Counters) -> float | None:
    """Tau: committed tokens per verify call; None where it cannot be told."""
    if told is not None and told.count:
        return told.committed / told.count
    if not moved.verify_calls:
        return None
    if moved.accepted is not None:
        return 1 + moved.accepted / moved.verify_calls
    tokens = moved.completion_tokens
    if tokens is None:
        tokens = sum(answer.completion_tokens for answer in answers)
    return (tokens - len(answers)) / moved.verify_calls  # the first token of each comes from prefill


def _tau(session: Session, answers: Sequence[Answer], told: Rounds | None, moved: Counters) -> Finding:
    promise = promise_of(session)
    floor, origin = _floor(session, promise)
    claim = f"a round commits at least {floor:.2f} tokens (tau)"
    tau = acceptance_length(answers, told, moved)
    if tau is None:
        return unknown("speculation", claim, "committed tokens per verify call cannot be told", *promise.told)
    session.measured["tau"] = round(tau, 4)
    seen = "; ".join((f"tau {tau:.2f} over {len(answers)} answers", *promise.told))
    if tau <= ONE:
        return violated(
            "speculation",
            claim,
            seen,
            "an acceptance length of 1.00 means that no drafted token is ever accepted",
            remedy="the drafter is not the target's, or its context is not written: check its folder, taps and window",
        )
    if tau < floor:
        return violated(
            "speculation",
            claim,
            seen,
            f"the floor is {floor:.2f}, {origin}",
            remedy="check that the drafter was trained for this target, its taps, its block size and its window; start "
            "the server again if the drafter's files are newer than it",
        )
    return proven("speculation", claim, seen, f"the floor is {floor:.2f}, {origin}")


def _floor(session: Session, promise: Promise) -> tuple[float, str]:
    """Committed tokens per round, and where that stands."""
    expectation = session.expectation
    if expectation.is_tau_floor_declared:
        return expectation.tau_floor, f"declared by {expectation.origin}"
    if promise.floor is not None and promise.floor > expectation.tau_floor:
        return promise.floor, "by what the drafter's folder promises; declare another if need be"
    return expectation.tau_floor, "since drafters of random weights reach 1.0 to 1.1"


def _budget(session: Session, told: Rounds | None, moved: Counters) -> Iterator[Finding]:
    declared = session.expectation.settings.get("budget", session.effective.settings.get("budget"))
    if not isinstance(declared, int):
        return
    claim = f"rounds verify {declared} nodes"
    if told is not None and told.budgets:
        found = sorted(set(told.budgets))
        source = "the responses tell"
    elif moved.proposed is not None and moved.verify_calls:
        found = [moved.proposed / moved.verify_calls]
        source = "the counters tell"
    else:
        is_declared = "budget" in session.expectation.settings
        yield unknown("speculation", claim, "nodes of a round are not told", is_required=is_declared)
        return
    words = f"{source} {', '.join(f'{each:g}' for each in found[:8])} nodes a round"
    if all(abs(each - declared) < 0.01 for each in found):
        yield proven("speculation", claim, words)
    else:
        yield violated(
            "speculation", claim, words, remedy=f"start the server with a budget of {declared}, or declare what runs"
        )
