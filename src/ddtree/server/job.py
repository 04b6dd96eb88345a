"""One sequence that a client waits for, as the asyncio side sees it."""

import asyncio
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from ddtree.engine import Completion, SamplingParams, Speculation, TokenLogprob
from ddtree.server.grammar import GrammarState


@dataclass(frozen=True)
class Delta:
    """What was written since the last delta; ``completion`` comes with the last one."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    completion: Completion | None = None


@dataclass(eq=False)
class Job:
    """Ordered by the asyncio side, done by the engine thread, which reports through the event loop.

    All methods belong to the event loop. What the client does not fetch in time is merged, so that a slow client costs
    no more memory than its answer.

    Attributes:
        prompt: token ids.
        wake: set whenever there is news; jobs of one request share it.
        streams: pieces of the answer are news; otherwise only its end is.
        has_begun: it left the queue.
        ordered: host time of the order, in seconds.
    """

    prompt: Seq[int]
    params: SamplingParams
    speculation: Speculation | None
    constraint: GrammarState | None
    wake: asyncio.Event
    streams: bool = True
    has_begun: bool = False
    ordered: float = field(default_factory=time.perf_counter)
    _text: str = ""
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _completion: Completion | None = None
    _error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """The engine is done with it, one way or the other."""
        return self._completion is not None or self._error is not None

    def begin(self) -> None:
        """It left the queue."""
        self.has_begun = True
        self.wake.set()

    def write(self, delta: Delta) -> None:
        """More of the answer."""
        self._text += delta.text
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._completion = delta.completion
        self.wake.set()

    def fail(self, error: Exception) -> None:
        """It will not be finished; ``error`` goes to whoever waits."""
        if not self.is_over:
            self._error = error
            self.wake.set()

    def take_error(self) -> None:
        """Raise the error that ended the job, if one did."""
        if self._error is not None:
            raise self._error

    def take(self) -> Delta | None:
        """What came since the last call, or None.

        Raises:
            Exception: the error that ended the job.
        """
        self.take_error()
        if not self._token_ids and self._completion is None:
            return None
        delta = Delta(self._text, self._token_ids, self._logprobs, self._completion)
        self._text, self._token_ids, self._logprobs = "", [], []
        return delta
