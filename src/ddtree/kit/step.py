"""One step of a restore, as it stands before anything is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["done", "to do", "refused", "unknown"]


@dataclass(frozen=True)
class Step:
    """Attributes:
    name: `doctor`, `model`, `drafter`, `environment`, `patches`, `service`, `verify` or `canary`.
    told: what is to be done, or why not, in one line.
    """

    name: str
    state: State
    told: str
