"""Result folders go in whole; beside them, one folder for each measured configuration, with a manifest of its own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ddtree.bench.numbers import CellNumbers, cell_numbers
from ddtree.bench.record import RequestRow, RunRecord, SessionRecord, UnitRow
from ddtree.bench.result_folder import RUN, read_requests, read_run, read_sessions, read_units
from ddtree.bench.statistics import Estimate
from ddtree.bench.sweep.store import SWEEP, counting_variants
from ddtree.deploy.deployment import parse_deployment
from ddtree.deploy.render import render
from ddtree.disk import UNFINISHED
from ddtree.errors import UserError
from ddtree.kit.mask import Masker
from ddtree.kit.names import checked, slug
from ddtree.kit.record import EXPERIMENT, CellSummary, ExperimentRecord
from ddtree.report.configuration import configuration_of

MANIFEST = "manifest-sha256.txt"
_SKIPPED = {".lock"}


@dataclass(frozen=True)
class Measured:
    """A configuration of one run."""

    run: RunRecord
    variant: str
    units: list[UnitRow]
    rows: list[RequestRow]
    sessions: list[SessionRecord]


def copy_results(folders: Sequence[Path], payload: Path, masker: Masker) -> list[str]:
    """Copy result folders to ``bench/results/``; returns their places, relative to the payload.

    Raises:
        UserError: one holds no results, or two have the same name and are not the same.
    """
    places = []
    for folder in folders:
        if not folder.is_dir() or not any(folder.rglob(RUN)):
            raise UserError(f"{folder} holds no results", "give folders of ddtree bench or sweep")
        if any((parent / SWEEP).exists() for parent in folder.resolve().parents):
            raise UserError(f"{folder} is a part of a sweep, which tells what of it counts", "give the sweep's folder")
        place = f"bench/results/{slug(folder.resolve().name)}"
        if (payload / place).exists():
            raise UserError(f"the kit has {place} already", "rename the folder of results")
        copy_tree(folder, payload / place, place, masker)
        places.append(place)
    return places


def copy_tree(source: Path, target: Path, inside: str, masker: Masker) -> None:
    """Copy regular files without secrets; locks, links and what is half-written stay away."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_symlink() or not path.is_file() or path.name in _SKIPPED or path.name.endswith(UNFINISHED):
            continue
        checked(f"{inside}/{name}")
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(masker.content(path.read_bytes(), f"{inside}/{name}"))


def write_experiments(payload: Path, results: Sequence[str]) -> list[str]:
    """``experiments/<id>/`` for each configuration below ``results`` whose numbers count; returns their ids."""
    found = []
    for result in results:
        for run_file in sorted((payload / result).rglob(RUN)):
            for measured in _configurations(run_file.parent):
                place = run_file.parent.relative_to(payload).as_posix()
                found.append(_write(payload, place, measured))
    return found


def _configurations(folder: Path) -> list[Measured]:
    run, units, rows, sessions = read_run(folder), read_units(folder), read_requests(folder), read_sessions(folder)
    counting = counting_variants(folder)
    variants = [name for name in dict.fromkeys(unit.variant for unit in units) if counting is None or name in counting]
    return [
        Measured(
            run,
            variant,
            [unit for unit in units if unit.variant == variant],
            [row for row in rows if row.variant == variant],
            sessions,
        )
        for variant in variants
    ]


def _write(payload: Path, results: str, measured: Measured) -> str:
    identity = slug(f"{measured.run.run_id}-{measured.variant.replace(':', '-')}")
    folder = payload / "experiments" / identity
    folder.mkdir(parents=True, exist_ok=True)
    record = _record(payload / results, results, identity, measured)
    (folder / EXPERIMENT).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    files = [folder / EXPERIMENT, *(path for path in sorted((payload / results).rglob("*")) if path.is_file())]
    lines = []
    for path in files:
        name = os.path.relpath(path, folder).replace(os.sep, "/")
        lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n")
    (folder / MANIFEST).write_text("".join(lines), encoding="utf-8")
    return identity


def _record(folder: Path, results: str, identity: str, measured: Measured) -> ExperimentRecord:
    run, session = measured.run, measured.sessions[-1] if measured.sessions else None
    command, environment = _service(session)
    wanted = [unit for unit in run.plan.units if f"/{measured.variant}/r" in unit]
    ended = max((unit.started_at + unit.duration_s for unit in measured.units), default=run.created_at)
    started = min((unit.started_at for unit in measured.units), default=run.created_at)
    return ExperimentRecord(
        id=identity,
        run_id=run.run_id,
        label=run.label,
        configuration=configuration_of(run, measured.variant).name,
        variant=measured.variant,
        results=results,
        settings=run.settings,
        command=session.command if session else [],
        service_command=command,
        service_environment=environment,
        server_facts=session.server_facts if session else {},
        engine=session.engine if session else "unknown",
        versions=session.versions if session else {},
        commit=session.commit if session else None,
        host=session.host if session else {},
        gpus=session.gpus if session else [],
        started=_told(started),
        ended=_told(ended),
        is_complete=len(measured.units) == len(wanted),
        verdict=_verdict(folder),
        deployment_sha256=session.deployment_sha256 if session else None,
        workloads={each.name: each.sha256 for each in run.plan.workloads},
        cells=[_summary(each) for each in cell_numbers(measured.units, measured.rows)],
    )


def _service(session: SessionRecord | None) -> tuple[list[str] | None, dict[str, str] | None]:
    """What the deployment file that was kept with the results renders to."""
    if session is None or session.deployment_text is None:
        return None, None
    try:
        rendered = render(parse_deployment(session.deployment_text))
    except UserError:
        return None, None
    return list(rendered.command), dict(rendered.environment)


def _verdict(folder: Path) -> str | None:
    try:
        told = json.loads((folder / "verify.json").read_text(encoding="utf-8"))
        return str(told["verdict"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _summary(cell: CellNumbers) -> CellSummary:
    key = cell.key
    return CellSummary(
        workload=key.workload,
        context_tokens=key.context_tokens,
        concurrency=key.concurrency,
        temperature=key.temperature,
        requests=cell.requests,
        errors=cell.errors,
        user_tok_s=_three(cell.user_tok_s),
        total_tok_s=_three(cell.total_tok_s),
        ttft_ms=_three(cell.ttft_ms),
        tau=_three(cell.tau),
    )


def _three(estimate: Estimate | None) -> tuple[float, float, float] | None:
    return (estimate.value, estimate.low, estimate.high) if estimate else None


def _told(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
