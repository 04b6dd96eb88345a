"""The asyncio side of the server: who may order answers, who waits for one, and how all of it ends."""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from ddtree.engine import Engine, SamplingParams, Speculation
from ddtree.engine.engine import Progress
from ddtree.server.api_error import ApiError
from ddtree.server.engine_thread import EngineThread, shutting_down
from ddtree.server.grammar import Grammar
from ddtree.server.grammar_store import GrammarStore
from ddtree.server.job import Delta, Job
from ddtree.server.metrics import Metrics
from ddtree.server.pulse import Pulse
from ddtree.server.readiness import DRAINING, Readiness
from ddtree.server.settings import ServerSettings


@dataclass(frozen=True)
class Work:
    """One sequence to generate."""

    prompt: list[int]
    params: SamplingParams
    speculation: Speculation | None
    grammar: Grammar | None = None


class Service:
    """What the routes share.

    Args:
        load: makes the engine, in its own thread.
        on_end: called when the engine's thread ends, with the error where it was one.

    Attributes:
        long_texts: a thread in which they are made into tokens, one after the other.
    """

    def __init__(
        self,
        settings: ServerSettings,
        load: Callable[[Progress], Engine],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self.settings, self.metrics, self.pulse = settings, Metrics(), Pulse()
        self.started, self.grammars = time.time(), GrammarStore()
        self.long_texts = ThreadPoolExecutor(1, "long-text")
        self._jobs: set[Job] = set()
        self._is_draining = False
        self.thread = EngineThread(load, asyncio.get_running_loop(), self.pulse, self.metrics, on_end)
        self.thread.start()

    @property
    def readiness(self) -> Readiness:
        """Whether an answer can be expected now."""
        if self._is_draining:
            return DRAINING
        stuck_s = self.pulse.in_step_s
        if self.thread.readiness.is_ready and stuck_s > self.settings.stall_s:
            return Readiness(False, f"stalled: a round has been running for {stuck_s:.0f} s", 0.0)
        return self.thread.readiness

    @property
    def unfinished(self) -> int:
        """Answers that run or wait."""
        return sum(not job.is_over for job in self._jobs)

    def open_engine(self) -> Engine:
        """The engine, to read from.

        Raises:
            ApiError: 503 where no request is taken now.
        """
        readiness = self.readiness
        if self.thread.engine is None or not readiness.is_ready:
            raise ApiError(503, f"the server is not ready: {readiness.stage}", code="not_ready", retry_after_s=5)
        return self.thread.engine

    def order(self, works: list[Work], streams: bool) -> "Answer":
        """Have sequences generated.

        Args:
            streams: pieces are wanted as they come; otherwise nobody is woken before an answer is whole.

        Raises:
            ApiError: 503 where no request is taken now, 429 where too many wait.
        """
        slots = self.open_engine().max_batch
        room = slots + self.settings.max_queue
        if len(works) > room:
            raise ApiError(400, f"{len(works)} answers are more than the {room} that fit the queue", param="n")
        if self.unfinished + len(works) > room:
            raise ApiError(
                429, f"{self.unfinished} answers run or wait, the limit is {room}", code="queue_full", retry_after_s=1
            )
        wake = asyncio.Event()
        jobs = [
            Job(work.prompt, work.params, work.speculation, constraint, wake, streams)
            for work in works
            for constraint in (work.grammar.start() if work.grammar else None,)
        ]
        self._jobs.update(jobs)
        for job in jobs:
            self.thread.submit(job)
        return Answer(self, jobs, wake)

    def forget(self, jobs: list[Job]) -> None:
        """Nobody waits for these any more."""
        for job in jobs:
            self._jobs.discard(job)
            if not job.is_over:
                self.thread.cancel(job)

    async def drain(self) -> None:
        """Take no more requests; let those that run end, and after the settings' time give them up."""
        self._is_draining = True
        deadline = time.monotonic() + self.settings.drain_s
        while self.unfinished and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for job in list(self._jobs):
            self.thread.cancel(job)
            job.fail(shutting_down())

    async def close(self) -> None:
        """End threads and processes."""
        self.long_texts.shutdown(wait=False, cancel_futures=True)
        await self.grammars.close()
        self.thread.stop(self.settings.stall_s)


class Answer:
    """The sequences of one request; a context that gives up what is unfinished when it is left."""

    def __init__(self, service: Service, jobs: list[Job], wake: asyncio.Event) -> None:
        self._service, self.jobs, self._wake = service, jobs, wake
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._queue_deadline = now + service.settings.queue_timeout_s
        self._deadline = now + service.settings.request_timeout_s
        self._unfinished = list(range(len(jobs)))
        self._is_late = False
        # One timer an answer: one for each wait would cost more than the rest of the wait.
        self._timer = loop.call_at(self._deadline, self._expire)

    def __enter__(self) -> "Answer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._service.forget(self.jobs)

    def _expire(self) -> None:
        self._is_late = True
        self._wake.set()

    async def begun(self) -> None:
        """Wait until the first sequence runs.

        Raises:
            ApiError: the request was refused by the engine, or waited too long.
        """
        while True:
            self._wake.clear()
            for job in self.jobs:
                if job.is_over:
                    job.take_error()
            if any(job.has_begun or job.is_over for job in self.jobs):
                return
            try:
                async with asyncio.timeout_at(min(self._queue_deadline, self._deadline)):
                    await self._wake.wait()
            except TimeoutError:
                waited = math.ceil(self._service.settings.queue_timeout_s)
                raise ApiError(
                    503, f"the request waited {waited} s and did not begin", code="queue_timeout", retry_after_s=5
                ) from None

    async def news(self) -> list[tuple[int, Delta]]:
        """Wait for more of the answers: what came since the last call, each piece with the number of its sequence.

        Returns:
            nothing once all of them are whole.

        Raises:
            ApiError: the answer cannot be finished.
        """
        while self._unfinished:
            self._wake.clear()
            news = [(i, delta) for i in self._unfinished if (delta := self.jobs[i].take()) is not None]
            if news:
                for i, delta in news:
                    if delta.completion is not None:
                        self._unfinished.remove(i)
                return news
            if self._is_late:
                limit = self._service.settings.request_timeout_s
                raise ApiError(503, f"the answer took longer than {limit:g} s", code="request_timeout", retry_after_s=5)
            await self._wake.wait()
        return []
