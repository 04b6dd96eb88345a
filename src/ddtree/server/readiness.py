"""Whether the server can serve right now, and if not, how far it is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Readiness:
    """A stage of a server's life.

    Attributes:
        is_ready: a token was generated end to end, and nothing speaks against the next one.
        stage: what is going on, in words.
        progress: how much of it is done, 0 to 1.
    """

    is_ready: bool
    stage: str
    progress: float


STARTING = Readiness(False, "starting", 0.0)
READY = Readiness(True, "ready", 1.0)
DRAINING = Readiness(False, "shutting down", 1.0)
