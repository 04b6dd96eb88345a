"""Measures one unit: as many slots as its concurrency, each sending its next request when the last has ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ddtree.bench.account import cached_tokens, check, digest, drafting, recount
from ddtree.bench.answer import Answer, ask
from ddtree.bench.endpoint import Endpoint
from ddtree.bench.plan import Load
from ddtree.bench.record import RequestRow, Unit, UnitRow
from ddtree.bench.throughput import throughput
from ddtree.bench.workload import Problem
from ddtree.errors import UserError

_TICK_S = 0.01
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass
class Measured:
    """A unit's rows and sums, still without its place on disk."""

    rows: list[RequestRow] = field(default_factory=list)
    duration_s: float = 0.0
    started_at: float = 0.0
    client_lag_ms: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)
    metrics_tau: float | None = None


class UnitRun:
    """One attempt at a unit.

    Args:
        on_row: called with each row that is complete, at once.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        load: Load,
        unit: Unit,
        run_id: str,
        attempt: int,
        on_row: Callable[[RequestRow], None] = lambda row: None,
    ) -> None:
        self._endpoint, self._load, self._unit = endpoint, load, unit
        self._on_row = on_row
        cell = unit.cell
        self._place: dict[str, Any] = {
            "run_id": run_id,
            "unit": unit.name,
            "workload": cell.workload,
            "context_tokens": cell.context_tokens,
            "concurrency": cell.concurrency,
            "temperature": cell.temperature,
            "variant": cell.variant.name,
            "repetition": unit.repetition,
            "attempt": attempt,
        }
        self._answers: list[tuple[Answer, RequestRow, Callable[[], RequestRow]]] = []

    async def measure(self, problems: Sequence[Problem]) -> Measured:
        """Run all ``problems``, in order, and check the answers afterwards, when no clock runs."""
        result = Measured()
        before = await self._endpoint.counters()
        await self._endpoint.open_connections(self._unit.cell.concurrency)
        waiting = deque(problems)
        with _Lag() as lag:
            result.started_at = time.time()
            began = time.perf_counter()
            async with asyncio.TaskGroup() as slots:
                for _ in range(self._unit.cell.concurrency):
                    slots.create_task(self._slot(waiting, began))
            result.duration_s = time.perf_counter() - began
        result.client_lag_ms = lag.worst_ms
        for answer, noted, row in self._answers:
            await self._recount(answer)
            result.rows.append(noted if answer.error_kind == noted.error_kind else row())
        after = await self._endpoint.counters()
        result.counters = {name: after[name] - before[name] for name in after if name in before}
        result.metrics_tau = tau_of(result.counters)
        return result

    def unit_row(self, result: Measured) -> UnitRow:
        """The line that makes the unit count; the result folder adds where its rows end."""
        speed = throughput(result.rows, self._unit.cell.concurrency, result.duration_s)
        return UnitRow(
            **self._place,
            started_at=result.started_at,
            duration_s=result.duration_s,
            requests=len(result.rows),
            errors=dict(Counter(row.error_kind for row in result.rows if row.error_kind)),
            window_s=speed.window_s,
            steady_tok_s=speed.steady_tok_s,
            whole_tok_s=speed.whole_tok_s,
            metrics_tau=result.metrics_tau,
            metrics=result.counters,
            client_lag_ms=result.client_lag_ms,
            requests_end_byte=0,
        )

    async def _slot(self, waiting: deque[Problem], began: float) -> None:
        while waiting:
            await self._converse(waiting.popleft(), began)

    async def _converse(self, problem: Problem, began: float) -> None:
        """All turns of one conversation; a failed turn ends it, since the next ones build on it."""
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(problem.turns):
            messages = [*messages, {"role": "user", "content": text}]
            body = self._body(messages, f"{problem.id}/{turn}")
            sent_s, started_at = time.perf_counter() - began, time.time()
            url = self._endpoint.url + _PATHS[self._load.api]
            answer = await ask(
                self._endpoint.client, url, body, self._load.request_timeout_s, self._load.stall_timeout_s
            )
            check(answer, self._unit.cell.variant, self._load.max_tokens)
            row = partial(self._row, problem, turn, digest(messages), answer, sent_s, started_at)
            noted = row()
            self._answers.append((answer, noted, row))
            self._on_row(noted)
            if answer.error_kind:
                return
            messages = [*messages, {"role": "assistant", "content": answer.reply}]

    async def _recount(self, answer: Answer) -> None:
        if answer.error_kind is None and answer.text:
            try:
                counted = await self._endpoint.count_text(answer.text)
            except UserError:
                return  # the server may be gone; the answer itself came whole
            if counted is not None:
                recount(answer, counted, self._load.ignore_eos)

    def _body(self, messages: list[dict[str, str]], request: str) -> dict[str, Any]:
        load, cell = self._load, self._unit.cell
        prompt: dict[str, Any] = {"messages": messages}
        if load.api == "completions":
            prompt = {"prompt": messages[-1]["content"]}
        body = {
            "model": self._endpoint.model,
            **prompt,
            "max_tokens": load.max_tokens,
            "temperature": cell.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **cell.variant.body(),
        }
        if load.ignore_eos:
            body["ignore_eos"] = True
        if cell.temperature > 0:
            # One of its own for each request, the same in every variant: with a common one, answers would share chance.
            body["seed"] = int(digest(f"{load.seed}/{self._unit.repetition}/{request}")[:7], 16)
        return body

    def _row(
        self, problem: Problem, turn: int, prompt_sha256: str, answer: Answer, sent_s: float, started_at: float
    ) -> RequestRow:
        own, usage = drafting(answer), answer.usage or {}
        is_good = answer.error_kind is None
        return RequestRow(
            **self._place,
            prompt_id=problem.id,
            turn=turn,
            started_at=started_at,
            sent_s=round(sent_s, 6),
            error_kind=answer.error_kind,
            error_text=answer.error_text,
            http_status=answer.http_status,
            chunk_ms=answer.chunk_ms,
            chunk_chars=answer.chunk_chars,
            ttft_ms=answer.ttft_ms,
            last_ms=answer.last_ms,
            end_ms=round(answer.end_ms, 3),
            prompt_tokens=usage.get("prompt_tokens") if is_good else None,
            completion_tokens=usage.get("completion_tokens") if is_good else None,
            cached_tokens=cached_tokens(usage) if is_good else None,
            finish_reason=answer.finish_reason,
            ran_mode=own.mode,
            ran_budget=own.budget,
            rounds=own.rounds,
            tau=own.tau,
            accepted_lengths=own.accepted_lengths,
            notes=own.notes,
            prompt_sha256=prompt_sha256,
            text_sha256=digest(answer.text) if is_good else None,
            text=answer.text if self._load.keep_text and is_good else None,
        )


def problems_of(unit: Unit, load: Load, problems: Sequence[Problem]) -> list[Problem]:
    """The conversations of a unit: each repetition goes on where the one before stopped, the same in every cell."""
    count = load.requests_of(unit.cell.concurrency)
    start = unit.repetition * count
    chosen = [problems[(start + index) % len(problems)] for index in range(count)]
    if not load.unique_prefix:
        return chosen
    return [
        replace(problem, turns=(f"[{digest(f'{unit.name}/{index}')[:12]}]\n{problem.turns[0]}", *problem.turns[1:]))
        for index, problem in enumerate(chosen)
    ]


def tau_of(moved: dict[str, float]) -> float | None:
    """Committed tokens per round, by how far the counters moved; the first token of an answer is no round's."""
    if moved.get("drafts"):
        return round(1 + moved.get("accepted", 0.0) / moved["drafts"], 4)
    if moved.get("rounds") and "completion_tokens" in moved:
        return round((moved["completion_tokens"] - moved.get("first_tokens", 0.0)) / moved["rounds"], 4)
    return None


class _Lag:
    """How late the event loop is: time that requests would be charged with, and the client took.

    A timer of the loop's own, not a task that sleeps, which would take several times as much of what it measures.
    """

    worst_ms = 0.0

    def __enter__(self) -> _Lag:
        self._loop = asyncio.get_running_loop()
        self._wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def _wait(self) -> None:
        self._due = self._loop.time() + _TICK_S
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self.worst_ms = max(self.worst_ms, (self._loop.time() - self._due) * 1e3)
        self._wait()
