"""One conversation before it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Draw:
    """What is fixed of a conversation before the target writes its part.

    Attributes:
        number: of the conversation, counted from 0.
        source: place in `DataFacts.sources`.
        tokens: the prompt, or what is given of it.
        ending: which of the generator's endings follows once the target has completed the user's turn by itself; None
            where ``tokens`` is the whole prompt.
        temperature: of the answer; 0 takes the argmax.
        turn_temperature: of the user's turn, where the target completes it.
        seed: of all sampling in this conversation, 0 .. 2**63 - 1.
    """

    number: int
    source: int
    tokens: Sequence[int]
    ending: int | None
    temperature: float
    turn_temperature: float
    seed: int


@dataclass(frozen=True)
class Written:
    """A conversation that the target has finished.

    Attributes:
        tokens: int64 ``[length]``, prompt and answer, its ending token included where it came to one.
        answer_start: index of the answer's first token.
    """

    draw: Draw
    tokens: npt.NDArray[np.int64]
    answer_start: int
