"""How large a round may be to run as a CUDA graph on this machine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphLimit:
    """What may be captured.

    Attributes:
        budget: largest budget whose rounds run as graphs; None where not even plain decoding does.
        reason: why it is not the largest that was asked for; empty where it is.
    """

    budget: int | None
    reason: str = ""
