"""What a measurement leaves on disk: one versioned schema, a JSON object a line.

A result folder holds ``run.json`` (one :class:`RunRecord`), ``sessions.jsonl`` (one :class:`SessionRecord` for each
start or resume), ``requests.jsonl`` (:class:`RequestRow`) and ``units.jsonl`` (:class:`UnitRow`). Times are
milliseconds since the request was sent unless a name says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SchemaVersion = Literal["1.0"]
SCHEMA_VERSION: SchemaVersion = "1.0"
SCHEMA = "schema.json"

Budget = Annotated[int, Field(ge=1, le=1024)] | Literal["auto"]


class Record(BaseModel):
    """Unknown fields are refused, so that a reader of another version says so."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Variant(Record):
    """How a request asks to be drafted. ``server``: nothing is asked, the server's own setting holds."""

    mode: Literal["server", "ar", "chain", "tree"] = "server"
    budget: Budget | None = None
    top_k_cap: Annotated[int, Field(ge=1, le=1024)] | None = None

    @property
    def name(self) -> str:
        """Such as ``tree:32:4``, the form in which it is typed."""
        parts: list[object] = [self.mode]
        if self.budget is not None or self.top_k_cap is not None:
            parts.append("default" if self.budget is None else self.budget)
        if self.top_k_cap is not None:
            parts.append(self.top_k_cap)
        return ":".join(map(str, parts))

    def body(self) -> dict[str, Any]:
        """The fields that a request carries for it."""
        if self.mode == "server":
            return {}
        given = {"mode": self.mode, "budget": self.budget, "top_k_cap": self.top_k_cap}
        return {"ddtree": {name: value for name, value in given.items() if value is not None}}


class Cell(Record):
    """One place of the matrix. ``context_tokens`` None: the prompts as they are."""

    workload: str
    context_tokens: int | None
    concurrency: int
    temperature: float
    variant: Variant

    @property
    def name(self) -> str:
        context = "as-is" if self.context_tokens is None else str(self.context_tokens)
        return f"{self.workload}/ctx-{context}/c{self.concurrency}/t{self.temperature:g}/{self.variant.name}"


class Unit(Record):
    """One repetition of a cell: what is measured and stored as a whole."""

    cell: Cell
    repetition: int

    @property
    def name(self) -> str:
        return f"{self.cell.name}/r{self.repetition}"


class _Place(Record):
    """Where a row belongs; flat, so that a data frame can group by it. ``attempt`` counts from 1."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    run_id: str
    unit: str
    workload: str
    context_tokens: int | None
    concurrency: int
    temperature: float
    variant: str
    repetition: int
    attempt: int


class RequestRow(_Place):
    """One request.

    Attributes:
        chunk_ms: arrival of each event that carried text, in the network read that completed it.
        chunk_chars: characters that each of them carried.
        last_ms: arrival of the last event with text or with the finish reason.
        end_ms: end of the stream, or of the attempt.
        error_kind: None for an answer whose numbers count.
        accepted_lengths: tokens that each round committed, where the engine tells.
        prompt_sha256: of the request's messages.
    """

    prompt_id: str
    turn: int
    started_at: float
    sent_s: float
    error_kind: str | None = None
    error_text: str | None = None
    http_status: int | None = None
    chunk_ms: list[float] = []
    chunk_chars: list[int] = []
    ttft_ms: float | None = None
    last_ms: float | None = None
    end_ms: float
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    ran_mode: str | None = None
    ran_budget: int | str | None = None
    rounds: int | None = None
    tau: float | None = None
    accepted_lengths: list[int] | None = None
    notes: list[str] = []
    prompt_sha256: str
    text_sha256: str | None = None
    text: str | None = None


class UnitRow(_Place):
    """A unit that is complete; a request row counts only where its unit has such a line.

    Attributes:
        window_s: begin and end of the steady window since the unit's start; None where there is none.
        steady_tok_s: tokens that arrived in the window over its length.
        whole_tok_s: tokens of all good answers over the time from the first request to the last end.
        metrics_tau: committed tokens per round, from the engine's counters before and after; None where they tell none.
        client_lag_ms: longest time by which this client's own event loop was late.
        requests_end_byte: length of ``requests.jsonl`` once the unit's rows were in it.
    """

    started_at: float
    duration_s: float
    requests: int
    errors: dict[str, int]
    window_s: tuple[float, float] | None
    steady_tok_s: float | None
    whole_tok_s: float
    metrics_tau: float | None
    metrics: dict[str, float]
    client_lag_ms: float
    requests_end_byte: int


class WorkloadRecord(Record):
    """Which prompts: enough to tell whether two runs had the same."""

    name: str
    source: str
    prompts: int
    sha256: str
    note: str | None = None


class PlanRecord(Record):
    """What was to be measured, in full; a resumed run must have the same."""

    base_url: str
    api: Literal["chat", "completions"]
    model: str | None
    workloads: list[WorkloadRecord]
    units: list[str]
    repetitions: int
    requests_per_unit: dict[str, int]
    max_tokens: int
    ignore_eos: bool
    seed: int
    warm_up_requests: int
    unique_prefix: bool
    request_timeout_s: float
    stall_timeout_s: float


class RunRecord(Record):
    """``run.json``. ``settings``: the deployment's keys that distinguish this run from others of a sweep."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    run_id: str
    created_at: float
    label: str
    settings: dict[str, Any] = {}
    plan: PlanRecord


class SessionRecord(Record):
    """What produced the rows that follow it: one line each time a run is begun or resumed."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    run_id: str
    started_at: float
    command: list[str]
    versions: dict[str, str | None]
    commit: str | None
    host: dict[str, Any]
    gpus: list[dict[str, str]]
    engine: str
    server_facts: dict[str, Any]
    deployment_file: str | None = None
    deployment_sha256: str | None = None
    deployment_text: str | None = None


BENCH_FILES: dict[str, type[Record]] = {
    "run.json": RunRecord,
    "sessions.jsonl": SessionRecord,
    "requests.jsonl": RequestRow,
    "units.jsonl": UnitRow,
}


def schema_text(files: Mapping[str, type[Record]] = BENCH_FILES) -> str:
    """``schema.json`` of a folder: the JSON Schema of each of its files (of a line, where a file has lines)."""
    schemas = {name: kind.model_json_schema() for name, kind in files.items()}
    return json.dumps({"schema_version": SCHEMA_VERSION, "files": schemas}, indent=2)
