"""The report's numbers against the same worked out from the raw lines, by other means."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from ddtree.bench.result_folder import read_requests, read_units
from ddtree.bench.throughput import throughput
from ddtree.report.results import read_results
from ddtree.report.write import ReportOptions, write_report

ROWS = Path(__file__).parent / "rows"
"""Two cells (1 and 4 at a time) of a sweep on one H200, SGLang, budget 32: 72 answers as they were measured."""


def recomputed(concurrency: int) -> dict[str, Any]:
    requests = [json.loads(line) for line in (ROWS / "requests.jsonl").read_text().splitlines()]
    rows = [row for row in requests if row["concurrency"] == concurrency]
    units = [json.loads(line) for line in (ROWS / "units.jsonl").read_text().splitlines()]
    totals, taus = [], []
    for unit in (unit for unit in units if unit["concurrency"] == concurrency):
        own = [row for row in rows if row["unit"] == unit["unit"]]
        sent = sorted(row["sent_s"] for row in own)
        begin, end = sent[2 * concurrency - 1], sent[-1]
        tokens = 0.0
        for row in own:
            share = row["completion_tokens"] / sum(row["chunk_chars"])
            for at_ms, size in zip(row["chunk_ms"], row["chunk_chars"], strict=True):
                if begin <= row["sent_s"] + at_ms / 1000 < end:
                    tokens += share * size
        totals.append(tokens / (end - begin))
        moved = unit["metrics"]
        taus.append((moved["completion_tokens"] - moved["first_tokens"]) / moved["rounds"])
    return {
        "ttft": statistics.median(row["chunk_ms"][0] for row in rows),
        "user": statistics.median(
            1000 * (row["completion_tokens"] - 1) / (row["last_ms"] - row["chunk_ms"][0]) for row in rows
        ),
        "total": statistics.median(totals),
        "totals": totals,
        "tau": statistics.median(taus),
        "requests": len(rows),
    }


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_cell(concurrency: int, tmp_path: Path) -> None:
    wanted = recomputed(concurrency)
    (numbers,) = [
        each.numbers for each in read_results([ROWS]).measurements if each.numbers.key.concurrency == concurrency
    ]
    rows, units = read_requests(ROWS), [unit for unit in read_units(ROWS) if unit.concurrency == concurrency]
    own = [
        throughput([row for row in rows if row.unit == u.unit], concurrency, u.duration_s).steady_tok_s for u in units
    ]
    assert own == pytest.approx(wanted["totals"]), "the window, or what arrived in it, is another"
    assert numbers.total_is_steady and numbers.requests == wanted["requests"]
    for found, name in (
        (numbers.ttft_ms, "ttft"),
        (numbers.user_tok_s, "user"),
        (numbers.total_tok_s, "total"),
        (numbers.tau, "tau"),
    ):
        assert found is not None and found.value == pytest.approx(wanted[name], rel=1e-3), name
        assert found.low <= found.value <= found.high
    text = write_report(ReportOptions(folders=(ROWS,), out=tmp_path, with_plots=False)).markdown.read_text()
    (line,) = [
        line
        for line in text.partition(f"### maths-and-code, prompts as they are, {concurrency} at a time")[2].splitlines()
        if line.startswith("| tree 32 | ")
    ][:1]
    cells = [cell.split()[0] for cell in line.strip("| ").split(" | ")]
    assert cells[1] == f"{wanted['user']:,.0f}" and cells[2] == f"{wanted['total']:,.0f}"
    assert cells[3] == f"{wanted['ttft']:.1f}" and cells[5] == f"{wanted['tau']:.2f}"
