"""A whole run: units in order, each on disk before the next begins."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any

from ddtree.bench.endpoint import Endpoint, clean_url, connect, make_client
from ddtree.bench.files import locked
from ddtree.bench.measure import Measured, UnitRun, problems_of
from ddtree.bench.padding import PadText, pad, pad_text_of
from ddtree.bench.plan import Load, Matrix, plan_record, units_in_order
from ddtree.bench.provenance import read_deployment, session_record
from ddtree.bench.record import SCHEMA, Cell, RequestRow, RunRecord, Unit, UnitRow, schema_text
from ddtree.bench.result_folder import ResultFolder
from ddtree.bench.workload import Problem
from ddtree.disk import write_whole
from ddtree.errors import UserError

_WARM_UP_TOKENS = 32


@dataclass
class Watcher:
    """What a run tells while it goes; each is called at once and must not take long."""

    on_plan: Callable[[list[Unit], int], None] = lambda units, done: None
    on_stage: Callable[[str], None] = lambda stage: None
    on_unit: Callable[[Unit], None] = lambda unit: None
    on_row: Callable[[RequestRow], None] = lambda row: None
    on_unit_done: Callable[[UnitRow], None] = lambda unit: None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where to measure and where to put it.

    Attributes:
        folder: of the results.
        label: what people call this run.
        settings: the deployment's keys that tell this run from others.
        pad_text: what contexts are filled with; None: the workload's own prompts.
        told_url: the server's address as it is stored, where ``url`` is a way to it that changes.
        deployment: file from which the server was deployed, to be kept with the results.
    """

    url: str
    folder: Path
    matrix: Matrix
    load: Load = field(default_factory=Load)
    api_key: str | None = None
    model: str | None = None
    label: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    pad_text: PadText | None = None
    told_url: str | None = None
    deployment: Path | None = None
    resume: bool = False


def run_bench(options: RunOptions, watcher: Watcher | None = None) -> RunRecord:
    """Measure everything that is not measured yet; returns the run's record.

    Ctrl-C ends it with what is done on disk.

    Raises:
        UserError: the server, the workload or the folder will not do.
    """
    check_options(options)
    with locked(options.folder):
        return asyncio.run(_run(options, watcher or Watcher()))


def check_options(options: RunOptions) -> None:
    """Refuse what cannot be measured, before a server is asked."""
    clean_url(options.url)
    options.matrix.cells()
    read_deployment(options.deployment)
    if options.load.api == "completions":
        for workload in options.matrix.workloads:
            if any(len(problem.turns) > 1 for problem in workload.problems):
                raise UserError(f"{workload.name} has conversations of several turns", "use --api chat")
        if any(context is not None for context in options.matrix.contexts):
            raise UserError("contexts are counted with the chat template", "use --api chat, or leave --context out")
    for context in options.matrix.contexts:
        if context is not None and context < 16:
            raise UserError(f"a context of {context} tokens holds no prompt", "ask for at least 16")


async def _run(options: RunOptions, watcher: Watcher) -> RunRecord:
    url = clean_url(options.url)
    async with make_client(url, options.api_key) as client:
        watcher.on_stage("asking the server what it is")
        endpoint = await connect(url, client, options.model)
        cells = options.matrix.cells()
        _refuse_variants(endpoint, cells)
        units = units_in_order(cells, options.load)
        plan = plan_record(options.matrix, options.load, options.told_url or url, endpoint.model)
        run = RunRecord(
            run_id=uuid.uuid4().hex[:12],
            created_at=time(),
            label=options.label or options.folder.name,
            settings=options.settings,
            plan=plan,
        )
        with ResultFolder(options.folder) as results:
            run = results.begin(run, options.resume)
            write_whole(options.folder / SCHEMA, schema_text())
            done = results.done()
            todo = [unit for unit in units if unit.name not in done]
            watcher.on_plan(units, len(units) - len(todo))
            if todo:
                results.begin_session(session_record(run.run_id, endpoint, options.deployment))
                prompts = await _prompts(options, endpoint, todo, watcher)
                await _warm_up(options, endpoint, todo, prompts, run.run_id, watcher)
                attempts = results.attempts()
                for unit in todo:
                    attempt = attempts.get(unit.name, 0) + 1
                    await _unit(options, endpoint, unit, prompts, run.run_id, attempt, results, watcher)
            return run


async def _unit(
    options: RunOptions,
    endpoint: Endpoint,
    unit: Unit,
    prompts: dict[tuple[str, int | None], list[Problem]],
    run_id: str,
    attempt: int,
    results: ResultFolder,
    watcher: Watcher,
) -> None:
    watcher.on_unit(unit)

    def on_row(row: RequestRow) -> None:
        results.note(row)
        watcher.on_row(row)

    attempted = UnitRun(endpoint, options.load, unit, run_id, attempt, on_row)
    chosen = problems_of(unit, options.load, prompts[unit.cell.workload, unit.cell.context_tokens])
    measured: Measured = await attempted.measure(chosen)
    if all(row.error_kind == "no_connection" for row in measured.rows):
        words = measured.rows[0].error_text
        raise UserError(f"the server has gone ({words})", "start it again and add --resume: what is done is kept")
    watcher.on_unit_done(results.commit(measured.rows, attempted.unit_row(measured)))


async def _prompts(
    options: RunOptions, endpoint: Endpoint, todo: list[Unit], watcher: Watcher
) -> dict[tuple[str, int | None], list[Problem]]:
    """The prompts by workload and context, padded where a context is asked for."""
    found: dict[tuple[str, int | None], list[Problem]] = {}
    most = max(unit.repetition + 1 for unit in todo) * max(
        options.load.requests_of(unit.cell.concurrency) for unit in todo
    )
    for workload in options.matrix.workloads:
        for context in options.matrix.contexts:
            problems = list(workload.problems)
            if context is not None:
                text = options.pad_text or pad_text_of(workload.problems)
                used = problems[:most]
                problems = []
                for index, problem in enumerate(used):
                    watcher.on_stage(f"filling contexts of {context} tokens: {index + 1} of {len(used)}")
                    problems.append(await pad(problem, index, context, text, endpoint.count_chat))
            found[workload.name, context] = problems
    return found


async def _warm_up(
    options: RunOptions,
    endpoint: Endpoint,
    todo: list[Unit],
    prompts: dict[tuple[str, int | None], list[Problem]],
    run_id: str,
    watcher: Watcher,
) -> None:
    """A few short requests of each cell, which are not kept: first uses compile, capture and fill caches."""
    if not options.load.warm_up_requests:
        return
    cells = list(dict.fromkeys(unit.cell.model_dump_json() for unit in todo))
    for number, text in enumerate(cells, 1):
        cell = Cell.model_validate_json(text)
        watcher.on_stage(f"warming up: {number} of {len(cells)}")
        load = Load(
            **vars(options.load) | {"max_tokens": min(_WARM_UP_TOKENS, options.load.max_tokens), "repetitions": 1}
        )
        problems = prompts[cell.workload, cell.context_tokens]
        count = max(options.load.warm_up_requests, cell.concurrency)
        chosen = [Problem(p.id, p.turns[:1]) for p in (problems * count)[:count]]
        measured = await UnitRun(endpoint, load, Unit(cell=cell, repetition=0), run_id, 1).measure(chosen)
        if all(row.error_kind for row in measured.rows) and measured.rows[0].http_status in (400, 401, 403, 404, 422):
            raise UserError(f"the server refuses {cell.name}: {measured.rows[0].error_text}", "measure something else")


def _refuse_variants(endpoint: Endpoint, cells: list[Cell]) -> None:
    if endpoint.engine == "native":
        return
    for cell in cells:
        if cell.variant.mode != "server":
            raise UserError(
                f"variant {cell.variant.name} is set per request, which only ddtree's own server honours",
                "leave --variant out, and deploy the setting instead (ddtree sweep does)",
            )
