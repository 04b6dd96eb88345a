"""What `ddtree train data` is asked for, checked before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddtree.errors import UserError
from ddtree.train.prompt_files import OnBadRow

Loops = Literal["cut", "drop", "keep"]


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """A folder of conversations to make.

    Attributes:
        model: Hugging Face folder of the target.
        prompts: files with their weights.
        out: folder to make or to go on with.
        exclude: files of evaluation prompts.
        allowed: sentences that prompts may share with evaluation prompts.
        answer_tokens: wanted in all; the last shard may bring some more.
        seats: conversations at a time; None for as many as make sense on the device.
        stop_after_s: stop after so many seconds; another run goes on.
        shard_draws: conversations begun for one shard, which is what an interruption can cost.

    Other attributes are as in `DataAsked`.
    """

    model: Path
    prompts: tuple[tuple[Path, float], ...]
    out: Path
    answer_tokens: int
    exclude: tuple[Path, ...] = ()
    allowed: tuple[str, ...] = ()
    greedy_share: float = 0.7
    self_prompt_share: float = 0.6
    temperature_low: float = 0.7
    temperature_high: float = 1.0
    max_prompt_tokens: int = 320
    max_answer_tokens: int = 320
    chat: bool = True
    loops: Loops = "cut"
    on_bad_row: OnBadRow = "refuse"
    seed: int = 0
    shard_draws: int = 1024
    seats: int | None = None
    stop_after_s: float | None = None
    device: str = "auto"
    dtype: str = "auto"

    def check(self) -> None:
        """Refuse what is out of range.

        Raises:
            UserError: names the flag.
        """
        if not self.prompts:
            raise UserError("no prompts", "give --prompts FILE.jsonl, at least once")
        for path, weight in self.prompts:
            if not (math.isfinite(weight) and weight > 0):
                raise UserError(f"the weight of {path} is {weight}", "give a number above 0")
        if self.allowed and not self.exclude:
            raise UserError("--allow without --exclude allows nothing", "give --exclude FILE too, or leave it out")
        for flag, share in (("--greedy-share", self.greedy_share), ("--self-prompt-share", self.self_prompt_share)):
            if not 0 <= share <= 1:
                raise UserError(f"{flag} is {share}", "choose a share from 0 to 1")
        if not 0.001 <= self.temperature_low <= self.temperature_high <= 100:
            raise UserError(
                f"--temperature runs from {self.temperature_low} to {self.temperature_high}",
                "choose a range within 0.001 to 100, the lower end first",
            )
        for flag, number in (
            ("--tokens", self.answer_tokens),
            ("--max-prompt", self.max_prompt_tokens),
            ("--max-answer", self.max_answer_tokens),
            ("--shard", self.shard_draws),
            ("--batch", 1 if self.seats is None else self.seats),
        ):
            if number < 1:
                raise UserError(f"{flag} is {number}", "choose at least 1")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed is {self.seed}", "choose 0 to 2**63 - 1")
        if self.stop_after_s is not None and not self.stop_after_s > 0:
            raise UserError(f"--stop-after is {self.stop_after_s}", "choose a number of seconds above 0")
