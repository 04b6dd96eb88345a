"""A short measurement of a restored service, against what was sealed for the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.bench.numbers import CellNumbers, cell_numbers
from ddtree.bench.plan import Load, Matrix, parse_variant
from ddtree.bench.record import RequestRow, UnitRow
from ddtree.bench.result_folder import read_requests, read_run, read_units
from ddtree.bench.run import RunOptions, Watcher, run_bench
from ddtree.bench.statistics import Estimate, ratio_of_medians
from ddtree.bench.workload import Workload, read_workload
from ddtree.deploy.deployment import Deployment
from ddtree.errors import UserError
from ddtree.kit.record import EXPERIMENT, ExperimentRecord, KitRecord, read_record

REPETITIONS = 2
_MODES = {"none": "ar", "dflash": "chain", "ddtree": "tree"}
_OF_BLOCKS = ("--block-size", "--draft-window")
_SET_AT_START = {"ar": (), "chain": _OF_BLOCKS, "tree": (*_OF_BLOCKS, "--draft-temperature")}
"""Flags of a native server that decide its drafts, and that no request can change."""


@dataclass(frozen=True)
class Canary:
    """What is to be measured again.

    Attributes:
        experiment: the sealed configuration.
        cell: its least loaded cell with plain prompts.
    """

    experiment: ExperimentRecord
    workload: Workload
    concurrency: int
    temperature: float
    folder: Path


@dataclass(frozen=True)
class Comparison:
    """A restored service against what was sealed, on the same prompts.

    Attributes:
        tau_sealed, tau_now: committed tokens a round.
        speed_ratio: tok/s of one user, now over sealed; machines differ, so it is told and not judged.
        is_within: the intervals of tau meet; where no rounds are counted, no answer failed.
    """

    configuration: str
    cell: str
    tau_sealed: Estimate | None
    tau_now: Estimate | None
    speed_ratio: Estimate | None
    errors: dict[str, int]
    is_within: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values, for machines."""
        estimates = {name: vars(value) if value else None for name, value in self._estimates().items()}
        plain = {"configuration": self.configuration, "cell": self.cell, "errors": self.errors}
        return plain | estimates | {"is_within": self.is_within}

    def _estimates(self) -> dict[str, Estimate | None]:
        return {"tau_sealed": self.tau_sealed, "tau_now": self.tau_now, "speed_ratio": self.speed_ratio}

    def told(self) -> str:
        """One line for people."""
        parts = [f"{self.configuration}, {self.cell}:"]
        if self.tau_sealed and self.tau_now:
            parts.append(f"tau {self.tau_now}, sealed {self.tau_sealed}")
            parts.append("(within its interval);" if self.is_within else "(OUTSIDE of its interval);")
        if self.speed_ratio:
            parts.append(f"speed {self.speed_ratio} times the sealed one")
        if self.errors:
            parts.append(f"; failed requests: {self.errors}")
        return " ".join(parts)


def choose_canary(payload: Path, kit: KitRecord, deployment: Deployment, command: Sequence[str]) -> Canary | str:
    """The sealed measurement that fits the restored service best; or why there is none."""
    if not kit.experiments:
        return "the kit has no results to compare with"
    workloads = _workloads(payload)
    found: list[tuple[int, Canary]] = []
    why = "no complete measurement of what this service can be asked for is sealed"
    for identity in kit.experiments:
        record = read_record(ExperimentRecord, payload / "experiments" / identity / EXPERIMENT)
        rank = _rank(record, deployment, command)
        if not record.is_complete or rank is None:
            continue
        cells = [each for each in record.cells if each.context_tokens is None and not each.errors]
        for cell in sorted(cells, key=lambda each: (each.concurrency, each.temperature)):
            workload = workloads(record.workloads[cell.workload], cell.workload)
            if workload is None:
                why = f"the prompts of {cell.workload} are not in the kit (add them with --extra when it is created)"
                continue
            place = payload / record.results
            folder = next(p.parent for p in place.rglob("run.json") if read_run(p.parent).run_id == record.run_id)
            found.append((rank, Canary(record, workload, cell.concurrency, cell.temperature, folder)))
            break
    return min(found, key=lambda each: each[0])[1] if found else why


def run_canary(
    canary: Canary, url: str, key: str | None, model: str | None, out: Path, watcher: Watcher | None = None
) -> Comparison:
    """Measure it again, with the prompts, lengths and seeds of then."""
    plan = read_run(canary.folder).plan
    repetitions = min(REPETITIONS, plan.repetitions)
    variant = parse_variant(canary.experiment.variant)
    matrix = Matrix(
        workloads=(canary.workload,),
        concurrencies=(canary.concurrency,),
        temperatures=(canary.temperature,),
        variants=(variant,),
    )
    load = Load(
        repetitions=repetitions,
        requests=plan.requests_per_unit[str(canary.concurrency)],
        max_tokens=plan.max_tokens,
        ignore_eos=plan.ignore_eos,
        seed=plan.seed,
        warm_up_requests=plan.warm_up_requests,
        unique_prefix=plan.unique_prefix,
        request_timeout_s=plan.request_timeout_s,
        stall_timeout_s=plan.stall_timeout_s,
        api=plan.api,
    )
    options = RunOptions(
        url=url, folder=out, matrix=matrix, load=load, api_key=key, model=model, label="canary", resume=True
    )
    run_bench(options, watcher)
    now = _numbers(read_units(out), read_requests(out), repetitions, canary)
    sealed = _numbers(read_units(canary.folder), read_requests(canary.folder), 1 << 30, canary)
    if now is None or sealed is None:
        raise UserError("the canary measured nothing", "see ddtree verify")
    ratio = ratio_of_medians(now.raw["user_tok_s"], sealed.raw["user_tok_s"])
    is_within = not now.errors
    if sealed.tau is not None:
        is_within = is_within and now.tau is not None and _meet(now.tau, sealed.tau)
    where = f"{canary.workload.name}, {canary.concurrency} at once, T={canary.temperature:g}"
    return Comparison(canary.experiment.configuration, where, sealed.tau, now.tau, ratio, now.errors, is_within)


def _meet(one: Estimate, other: Estimate) -> bool:
    return one.low <= other.high and other.low <= one.high


def _numbers(units: list[UnitRow], rows: list[RequestRow], repetitions: int, canary: Canary) -> CellNumbers | None:
    def fits(row: UnitRow | RequestRow) -> bool:
        place = (row.workload, row.context_tokens, row.concurrency, row.temperature, row.variant)
        wanted = (canary.workload.name, None, canary.concurrency, canary.temperature, canary.experiment.variant)
        return place == wanted and row.repetition < repetitions

    found = cell_numbers([unit for unit in units if fits(unit)], [row for row in rows if fits(row)])
    return found[0] if found else None


def _rank(record: ExperimentRecord, deployment: Deployment, command: Sequence[str]) -> int | None:
    """0: the very service; 1: its speculation, asked for per request; 2: another one that it can be asked for.

    None where it cannot be asked for: another engine, or drafts that only a start can change.
    """
    is_same = record.service_command is not None and record.service_command[1:] == list(command)[1:]
    if record.variant == "server":
        return 0 if is_same else None
    speculation = deployment.speculation
    mode, *numbers = record.variant.split(":")
    declared = [_MODES.get(speculation.algorithm), str(speculation.budget), str(speculation.topk_cap)]
    asked = [mode, *[*numbers, "None", "None"][:2]]
    if mode == "ar":
        asked[1:], declared[1:] = [], [] if speculation.algorithm == "none" else declared[1:]
    if deployment.engine.kind != "native":
        return None
    sealed = record.service_command or command
    if any(_value_of(flag, sealed) != _value_of(flag, command) for flag in _SET_AT_START[mode]):
        return None
    return 1 if asked == declared else 2


def _value_of(flag: str, command: Sequence[str]) -> str | None:
    return command[command.index(flag) + 1] if flag in command else None


def _workloads(payload: Path) -> Any:
    """Finds prompts in the kit by their digest."""
    files = [path for path in sorted((payload / "bench").rglob("*.jsonl")) if "results" not in path.parts]

    def find(digest: str, name: str) -> Workload | None:
        for path in files:
            try:
                whole = read_workload(f"{name}={path}")
            except UserError:
                continue
            for limit in (None, *range(1, len(whole.problems))):
                chosen = whole if limit is None else Workload(name, whole.source, whole.problems[:limit])
                if chosen.record().sha256 == digest:
                    return chosen
        return None

    return find
