"""The one thread that owns the engine: it takes orders from a queue, runs rounds, and reports to the event loop."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from ddtree.engine import Engine, SamplingParams, Sequence
from ddtree.engine.engine import Progress
from ddtree.errors import UserError
from ddtree.server.api_error import ApiError, from_user_error
from ddtree.server.job import Delta, Job
from ddtree.server.metrics import Metrics
from ddtree.server.pulse import Pulse
from ddtree.server.readiness import READY, STARTING, Readiness

WARM_UP_TOKENS = 16
log = logging.getLogger("ddtree.server")


@dataclass(eq=False)
class Seat:
    """A job in the engine, and what of it was reported."""

    sequence: Sequence
    has_begun: bool = False
    text: int = 0
    tokens: int = 0
    rounds: int = 0


class EngineThread:
    """Runs `load`, a warm-up, then rounds for as long as there are jobs.

    Args:
        load: makes the engine; told a callback for its stages.
        loop: the event loop that jobs belong to.
        on_end: called in the loop when the thread ends, with the error where it was one.

    Attributes:
        readiness: how far the thread is; replaced as a whole, so that any thread may read it.
        engine: there once `load` is through; other threads may only read what never changes.
    """

    def __init__(
        self,
        load: Callable[[Progress], Engine],
        loop: asyncio.AbstractEventLoop,
        pulse: Pulse,
        metrics: Metrics,
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self.readiness = STARTING
        self.engine: Engine | None = None
        self._load, self._loop, self._pulse, self._metrics, self._on_end = load, loop, pulse, metrics, on_end
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._seats: dict[Job, Seat] = {}
        self._news: list[Callable[[], None]] = []
        self._is_stopping = False
        # A daemon, so that a round that hangs cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Order an answer."""
        self._orders.put(partial(self._seat, job))

    def cancel(self, job: Job) -> None:
        """Give a job up; nothing happens where it is over."""
        self._orders.put(partial(self._leave, job))

    def stop(self, timeout_s: float) -> None:
        """End the thread after its round; what is seated fails. Waits at most ``timeout_s``."""
        self._orders.put(self._begin_to_stop)
        self._thread.join(min(timeout_s, threading.TIMEOUT_MAX))

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self.engine = engine = self._load(self._tell)
            engine.warm_up_batches(self._tell)
            self._warm_up(engine, "warming up")
            while not self._is_stopping:
                self._take_orders()
                if self._seats and not self._is_stopping:
                    self._step(engine)
        except BaseException as fault:
            error = fault
            self.readiness = Readiness(False, f"the engine ended: {type(fault).__name__}", 0.0)
        self._is_stopping = True
        self._fail_all(shutting_down())
        self._take_orders()  # those that came too late are refused
        self._news.append(partial(self._on_end, error))
        self._report()

    def _tell(self, stage: str, progress: float) -> None:
        self.readiness = Readiness(False, stage, progress)

    def _warm_up(self, engine: Engine, stage: str) -> None:
        """Generate end to end, by the way of every request; only then is the server ready."""
        self._tell(stage, 0.0)
        ids = engine.tokenizer.encode("Hello") or [0]
        engine.generate([ids[:1]], SamplingParams(max_new_tokens=WARM_UP_TOKENS, ignore_eos=True))
        self._pulse.step_ends([], 0, engine.occupancy())
        self.readiness = READY

    def _take_orders(self) -> None:
        """Carry out what was ordered; waits for an order where there is nothing else to do."""
        while not self._orders.empty() or not (self._seats or self._news or self._is_stopping):
            self._orders.get()()
        self._report()

    def _begin_to_stop(self) -> None:
        self._is_stopping = True

    def _seat(self, job: Job) -> None:
        if self._is_stopping or self.engine is None:
            self._news.append(partial(job.fail, shutting_down()))
            return
        try:
            sequence = self.engine.submit(
                job.prompt, job.params, speculation=job.speculation, constraint=job.constraint
            )
        except UserError as error:
            self._news.append(partial(job.fail, from_user_error(error)))
        except Exception:
            log.exception("a request could not be seated")
            self._news.append(partial(job.fail, ApiError(500, "the server failed to start this request")))
        else:
            self._seats[job] = Seat(sequence)

    def _leave(self, job: Job) -> None:
        if seat := self._seats.pop(job, None):
            assert self.engine is not None
            self.engine.cancel(seat.sequence)
            self._pulse.step_ends([], 0, self.engine.occupancy())

    def _step(self, engine: Engine) -> None:
        watched = self._start_recording()
        self._pulse.step_begins()
        try:
            advanced = set(engine.step())
        except Exception:
            log.exception("a round failed; its requests are given up")
            self._metrics.failed_steps.inc()
            self._fail_all(ApiError(500, "a round of the engine failed", code="engine_fault"))
            self._report()
            self._warm_up(engine, "starting again after a failed round")  # where that fails too, the server ends
            return
        if watched is not None:
            self._stop_recording(watched)
        accepted: list[int] = []
        tokens = 0
        for job, seat in list(self._seats.items()):
            if not seat.has_begun and seat.sequence.slot >= 0:
                seat.has_begun = True
                self._news.append(job.begin)
            if seat.sequence in advanced:
                fresh = seat.sequence.stats.accepted_lengths[seat.rounds :]
                tokens += len(seat.sequence.output) - seat.tokens
                accepted += fresh
                self._count(job, seat, fresh)
                self._write(job, seat)
        self._pulse.step_ends(accepted, tokens, engine.occupancy())
        self._report()

    def _count(self, job: Job, seat: Seat, accepted_lengths: list[int]) -> None:
        """Metrics of what a step brought to one sequence; before the client can see it."""
        sequence, metrics = seat.sequence, self._metrics
        metrics.completion_tokens.inc(len(sequence.output) - seat.tokens)
        if not seat.tokens:
            metrics.first_token_s.observe(time.perf_counter() - job.ordered)
            metrics.cached_prompt_tokens.inc(sequence.stats.cached_tokens)
        stats = sequence.stats
        rounds = zip(accepted_lengths, stats.round_ms[seat.rounds :], stats.round_budgets[seat.rounds :], strict=True)
        for length, round_ms, budget in rounds:
            metrics.count_round(sequence.shape.mode if budget else "ar", budget, length, round_ms / 1e3)
        if sequence.finish_reason:
            metrics.choices.labels(sequence.finish_reason).inc()

    def _write(self, job: Job, seat: Seat) -> None:
        sequence = seat.sequence
        done = sequence.completion() if sequence.finish_reason else None
        fault = job.constraint.fault if job.constraint else None
        if fault is not None:
            told = f"the answer could not be kept in the form that response_format or tools ask for ({fault})"
            self._news.append(partial(job.fail, ApiError(400, told, code="format_failed")))
        elif job.streams or done:
            new = slice(seat.tokens, None)
            delta = Delta(sequence.text[seat.text :], sequence.output[new], sequence.logprobs[new], done)
            self._news.append(partial(job.write, delta))
            seat.text = len(sequence.text)
        if done:
            del self._seats[job]
        seat.tokens, seat.rounds = len(sequence.output), sequence.stats.rounds

    def _start_recording(self) -> Sequence | None:
        """Let one sequence keep its next tree, where somebody watches."""
        if not self._pulse.wants_tree:
            return None
        running = (seat.sequence for seat in self._seats.values() if seat.sequence.is_prefilled)
        watched = next(running, None)
        if watched is not None:
            watched.record_trees = True
        return watched

    def _stop_recording(self, sequence: Sequence) -> None:
        if sequence.trees:
            self._pulse.saw(sequence.trees[-1])
        sequence.trees.clear()
        sequence.record_trees = False

    def _fail_all(self, error: Exception) -> None:
        """Give up everything that is seated or ordered."""
        for job, seat in list(self._seats.items()):
            self._news.append(partial(job.fail, error))
            if self.engine is not None:
                try:
                    self.engine.cancel(seat.sequence)
                except Exception:
                    log.exception("a sequence could not be cleared away")
        self._seats.clear()

    def _report(self) -> None:
        """Hand the news to the event loop, all at once."""
        news, self._news = self._news, []
        if news:
            try:
                self._loop.call_soon_threadsafe(_call_all, news)
            except RuntimeError:  # the loop is closed: nobody waits any more
                log.debug("news came after the end of the event loop")


def shutting_down() -> ApiError:
    """What a request gets that comes too late, or runs for too long after the server was told to end."""
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=5)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
