"""What the demo measures: the same prompts in every mode, their speed, and whether the text is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ddtree.engine import Completion, Engine

MODES = ("ar", "chain", "tree")


@dataclass(frozen=True)
class Verdict:
    """How a mode's tokens compare with those of plain decoding.

    ``kind`` is ``same``, ``near-tie`` (they part where the target itself hardly tells two tokens apart; ``token`` is
    the place and ``gap`` the logits' difference) or ``fault``.
    """

    kind: str
    token: int | None = None
    gap: float | None = None

    def __str__(self) -> str:
        if self.kind == "same":
            return "yes"
        if self.kind == "near-tie":
            return f"near-tie at token {self.token} (gap {self.gap:.3g})"
        return f"FAULT at token {self.token}"

    @property
    def weight(self) -> int:
        """Higher is worse."""
        return ("same", "near-tie", "fault").index(self.kind)


@dataclass
class ModeRun:
    """One prompt in one mode, over all repetitions."""

    completions: list[Completion] = field(default_factory=list)
    verdict: Verdict = field(default_factory=lambda: Verdict("same"))

    @property
    def tokens(self) -> int:
        """Tokens that the decoding rounds gave; the first token comes from the prompt's own pass."""
        return sum(self.completions[0].stats.accepted_lengths)

    @property
    def decode_s(self) -> float:
        """Median over the repetitions."""
        return median(sum(completion.stats.round_ms) for completion in self.completions) / 1e3

    @property
    def rounds(self) -> int:
        return self.completions[0].stats.rounds


@dataclass(frozen=True)
class ModeRow:
    """A line of the table: one mode over all prompts."""

    mode: str
    budget: int | Literal["auto"]
    decode_tok_s: float
    tau: float
    speed_against_ar: float
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        same_text = {"verdict": self.verdict.kind, "token": self.verdict.token, "gap": self.verdict.gap}
        return {
            "mode": self.mode,
            "budget": self.budget,
            "decode_tok_s": self.decode_tok_s,
            "tau": self.tau,
            "speed_against_ar": self.speed_against_ar,
            "same_text": same_text,
        }


def mode_order(repetition: int, prompt: int) -> tuple[str, ...]:
    """The modes in an order that changes from run to run, so that none always runs first or last."""
    turn = (repetition + prompt) % len(MODES)
    order = MODES[turn:] + MODES[:turn]
    return order if repetition % 2 == 0 else order[::-1]


def judge(engine: Engine, prompt: Any, reference: Sequence[int], token_ids: Sequence[int]) -> Verdict:
    """Compare ``token_ids`` with plain decoding's ``reference``; where they part, ask the target how close it was."""
    if list(token_ids) == list(reference):
        return Verdict("same")
    pairs = zip(token_ids, reference, strict=False)
    shorter = min(len(token_ids), len(reference))
    parting = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
    # Either text may be the one that left the target's first choice at this place: both are checked up to it.
    gap = 0.0
    for tokens in (token_ids, reference):
        report = engine.check_lossless(prompt, list(tokens))
        if report.faults or parting == shorter:
            return Verdict("fault", parting)
        gap = max([gap, *(tie.gap for tie in report.near_ties if tie.index == parting)])
    return Verdict("near-tie", parting, gap)


def mode_rows(runs: dict[str, list[ModeRun]]) -> list[ModeRow]:
    """The table, from each mode's runs (one a prompt)."""
    speed = {mode: sum(run.tokens for run in of_mode) / _total_s(of_mode) for mode, of_mode in runs.items()}
    return [
        ModeRow(
            mode=of_mode[0].completions[0].stats.mode,
            budget=of_mode[0].completions[0].stats.budget,
            decode_tok_s=speed[mode],
            tau=sum(run.tokens for run in of_mode) / max(1, sum(run.rounds for run in of_mode)),
            speed_against_ar=speed[mode] / speed["ar"] if speed["ar"] else 0.0,
            verdict=max((run.verdict for run in of_mode), key=lambda verdict: verdict.weight),
        )
        for mode, of_mode in runs.items()
    ]


def _total_s(runs: list[ModeRun]) -> float:
    return sum(run.decode_s for run in runs) or float("inf")
