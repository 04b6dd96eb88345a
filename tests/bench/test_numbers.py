"""What rows come to: speeds by the tokens of usage, windows, tau by rounds, errors apart."""

from __future__ import annotations

import pytest

from bench.made_rows import place, request_row, write_run
from ddtree.bench.numbers import cell_numbers, variant_order
from ddtree.bench.result_folder import read_requests, read_units
from ddtree.bench.throughput import decode_tok_s, throughput

CELL = ("w", None, 2, "tree:8")


def test_one_users_speed_is_by_tokens_not_events():
    row = request_row(place(CELL, 0), tok_s=40.0, tokens=81, chunks=3)
    assert decode_tok_s(row) == pytest.approx(40.0)
    assert decode_tok_s(request_row(place(CELL, 0), error="broken_stream")) is None
    assert decode_tok_s(request_row(place(CELL, 0), tokens=1)) is None


def test_the_steady_window():
    """Two slots with answers of 2 s one after the other: from the fourth request to the last, one cycle of both."""
    where = place(CELL, 0)
    rows = [
        request_row(where, sent_s=sent, ttft_ms=500.0, tok_s=20.0, tokens=31, chunks=31)
        for sent in (0.0, 0.5, 2.0, 2.5, 4.0, 4.5)
    ]
    found = throughput(rows, 2, 6.5)
    assert found.window_s == (2.5, 4.5)
    assert found.steady_tok_s == pytest.approx(2 * 31 / 2.0, abs=1)  # what two such slots give in the long run
    assert found.whole_tok_s == pytest.approx(6 * 31 / 6.5)


def test_no_window_where_slots_had_few_requests():
    rows = [request_row(place(CELL, 0), sent_s=sent) for sent in (0.0, 0.1, 0.5, 0.6)]
    assert throughput(rows, 2, 1.0).window_s is None


def test_failed_requests_bring_no_tokens():
    where = place(CELL, 0)
    rows = [request_row(where, sent_s=s) for s in (0.0, 0.1, 0.5)] + [request_row(where, sent_s=0.2, error="http_500")]
    assert throughput(rows, 2, 1.0).whole_tok_s == 3 * 21


def test_a_cell(tmp_path):
    write_run(tmp_path, {CELL: {"tok_s": 80.0, "ttft_ms": 120.0, "tau": 4.0, "errors": 1, "total_tok_s": 150.0}})
    (cell,) = cell_numbers(read_units(tmp_path), read_requests(tmp_path))
    assert cell.user_tok_s.value == pytest.approx(80) and cell.user_tok_s.n == 5
    assert cell.ttft_ms.value == 120 and cell.total_tok_s.value == pytest.approx(150)
    assert cell.tau.value == 4 and cell.accepted == {4: 5 * 4 * 5}
    assert cell.errors == {"http_500": 5} and cell.requests == 25 and cell.error_share.value == 0.2
    assert cell.completion_tokens == 20 * 21


def test_a_prompt_that_comes_again_makes_tau_no_surer(tmp_path):
    """Four prompts with taus of their own: measured twice or twenty times, the interval stays as wide."""
    widths = []
    for repetitions in (2, 20):
        folder = tmp_path / str(repetitions)
        write_run(folder, {CELL: {}}, repetitions=repetitions)
        rows = [
            row.model_copy(update={"rounds": 10, "tau": 2.0 + int(row.prompt_id[1:])}) for row in read_requests(folder)
        ]
        (cell,) = cell_numbers(read_units(folder), rows)
        assert cell.tau.value == pytest.approx(3.5) and cell.tau.n == 4
        widths.append(cell.tau.high - cell.tau.low)
    assert widths[1] == pytest.approx(widths[0], rel=0.05) and widths[0] > 1


def test_one_line_reads_it_elsewhere(tmp_path):
    """Plain JSON lines, every line with the same keys: what pandas.read_json(lines=True) and DuckDB want."""
    import json

    write_run(tmp_path, {CELL: {}, ("w", 512, 1, "ar"): {"errors": 1}})
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len({tuple(row) for row in rows}) == 1 and {row["schema_version"] for row in rows} == {"1.0"}


def test_variants_in_order():
    names = ["tree:auto", "tree:32:4", "chain", "tree:8", "ar", "tree:32", "server"]
    assert sorted(names, key=variant_order) == ["server", "ar", "chain", "tree:8", "tree:32", "tree:32:4", "tree:auto"]
