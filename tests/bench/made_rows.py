"""Rows as a run would have written them, from a few numbers."""

from __future__ import annotations

import time
from pathlib import Path

from ddtree.bench.record import PlanRecord, RequestRow, RunRecord, SessionRecord, UnitRow, WorkloadRecord
from ddtree.bench.result_folder import ResultFolder


def request_row(place, *, sent_s=0.0, ttft_ms=100.0, tok_s=50.0, tokens=21, tau=None, error=None, chunks=5, prompt="p"):
    """An answer of ``tokens`` tokens: the first after ``ttft_ms``, the others at ``tok_s``, in ``chunks`` events."""
    length_ms = (tokens - 1) / tok_s * 1e3
    times = [ttft_ms + length_ms * index / (chunks - 1) for index in range(chunks)]
    rounds = None if tau is None else round((tokens - 1) / tau)
    good = error is None
    return RequestRow(
        **place,
        prompt_id=prompt,
        turn=0,
        started_at=1.0,
        sent_s=sent_s,
        error_kind=error,
        error_text="it broke" if error else None,
        chunk_ms=times if good else [],
        chunk_chars=[4] * chunks if good else [],
        ttft_ms=ttft_ms if good else None,
        last_ms=times[-1] if good else None,
        end_ms=times[-1] if good else 5.0,
        prompt_tokens=10 if good else None,
        completion_tokens=tokens if good else None,
        finish_reason="length" if good else None,
        rounds=rounds if good else None,
        tau=tau if good else None,
        accepted_lengths=[round(tau)] * rounds if good and rounds and tau == round(tau) else None,
        prompt_sha256="0" * 64,
    )


def place(cell, repetition, run_id="run"):
    workload, context, concurrency, variant = cell
    context_name = "as-is" if context is None else context
    return {
        "run_id": run_id,
        "unit": f"{workload}/ctx-{context_name}/c{concurrency}/t0/{variant}/r{repetition}",
        "workload": workload,
        "context_tokens": context,
        "concurrency": concurrency,
        "temperature": 0.0,
        "variant": variant,
        "repetition": repetition,
        "attempt": 1,
    }


def write_run(
    folder: Path,
    cells: dict,
    *,
    repetitions=5,
    label="made",
    settings=None,
    gpus=(),
    missing=0,
    engine="native",
    plan=None,
    session=None,
) -> Path:
    """A result folder. ``cells``: (workload, context, concurrency, variant) to the arguments of its requests.

    ``total_tok_s`` among them is what its units say, in a steady window unless ``is_steady`` is false, and a tenth less
    over the whole unit; it varies by ``swing`` (0.02: 2 %) over the repetitions. ``plan``, ``session``: other fields.
    """
    units = [place(cell, r)["unit"] for r in range(repetitions) for cell in cells]
    planned = {
        "base_url": "http://127.0.0.1:1",
        "api": "chat",
        "model": "m",
        "workloads": [WorkloadRecord(name="w", source="made", prompts=4, sha256="1" * 64)],
        "units": units + [f"missing/{i}" for i in range(missing)],
        "repetitions": repetitions,
        "requests_per_unit": {"1": 4},
        "max_tokens": 32,
        "ignore_eos": False,
        "seed": 0,
        "warm_up_requests": 0,
        "unique_prefix": False,
        "request_timeout_s": 1,
        "stall_timeout_s": 1,
    }
    record = PlanRecord(**planned | (plan or {}))
    run = RunRecord(run_id="run", created_at=1.0, label=label, settings=settings or {}, plan=record)
    seen = {
        "run_id": "run",
        "started_at": time.mktime((2026, 5, 4, 12, 0, 0, 0, 0, 0)),
        "command": ["ddtree", "bench", "--workload", "w w.jsonl", "--resume"],
        "versions": {"ddtree": "0", "torch": None},
        "commit": "abc123",
        "host": {"cpu": "a CPU", "cores": 2, "memory_gib": 8},
        "gpus": list(gpus),
        "engine": engine,
        "server_facts": {"/server_info": {"versions": {"ddtree": "0"}, "requested": {"mode": "<script>"}}},
    }
    with ResultFolder(folder) as results:
        results.begin(run, resume=False)
        results.begin_session(SessionRecord(**seen | (session or {})))
        for repetition in range(repetitions):
            for cell, given in cells.items():
                given = dict(given)
                total = given.pop("total_tok_s", 50.0)
                errors = given.pop("errors", 0)
                is_steady, share = given.pop("is_steady", True), given.pop("swing", 0.02)
                swing = 1 + share * (repetition - (repetitions - 1) / 2) / max(1, repetitions)
                where = place(cell, repetition)
                rows = [request_row(where, sent_s=i, prompt=f"p{i}", **given) for i in range(4)]
                rows += [request_row(where, error="http_500") for _ in range(errors)]
                unit = UnitRow(
                    **where,
                    started_at=1.0,
                    duration_s=4.0,
                    requests=len(rows),
                    errors={"http_500": errors} if errors else {},
                    window_s=(0.1, 3.0) if is_steady else None,
                    steady_tok_s=total * swing if is_steady else None,
                    whole_tok_s=total * swing * 0.9,
                    metrics_tau=None,
                    metrics={},
                    client_lag_ms=1.0,
                    requests_end_byte=0,
                )
                results.commit(rows, unit)
    return folder
