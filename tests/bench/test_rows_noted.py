"""Rows of a unit that runs reach the disk together, and none is lost but by a kill."""

from __future__ import annotations

from bench.made_rows import place, request_row, write_run
from ddtree.bench import result_folder
from ddtree.bench.files import whole_lines
from ddtree.bench.result_folder import INTERRUPTED, REQUESTS, RUNNING, ResultFolder, read_run

CELL = ("w", None, 1, "ar")


def noted(folder, count, writes, monkeypatch, end=None):
    """Note ``count`` rows of a unit that is not committed; ``writes`` gets the lines of each write."""
    monkeypatch.setattr(
        result_folder, "append_line", lambda path, line: writes.append(line.count("\n") + 1) or real(path, line)
    )
    with ResultFolder(folder) as results:
        results.begin(read_run(folder), resume=True)
        for number in range(count):
            results.note(request_row(place(CELL, 99), prompt=f"p{number}"))
        if end:
            end(results)


real = result_folder.append_line


def test_many_rows_are_one_write(tmp_path, monkeypatch):
    folder, writes = write_run(tmp_path / "run", {CELL: {}}), []
    noted(folder, 50, writes, monkeypatch)
    assert sum(writes) == 50 and len(writes) == 2, "the first at once, the others together at the end"
    assert len(whole_lines(folder / RUNNING)) == 50
    with ResultFolder(folder) as results:
        results.begin(read_run(folder), resume=True)
    assert len(whole_lines(folder / INTERRUPTED)) == 50 and not (folder / RUNNING).exists()


def test_rows_that_wait_are_written_after_a_second(tmp_path, monkeypatch):
    folder, writes = write_run(tmp_path / "run", {CELL: {}}), []
    monkeypatch.setattr(result_folder, "_WRITE_EVERY_S", 0.0)
    noted(folder, 3, writes, monkeypatch)
    assert writes == [1, 1, 1]


def test_a_unit_that_is_done_leaves_nothing_behind(tmp_path, monkeypatch):
    folder, writes = write_run(tmp_path / "run", {CELL: {}}), []
    before = len(whole_lines(folder / REQUESTS))
    unit = result_folder.read_units(folder)[-1].model_copy(update=place(CELL, 99))
    rows = [request_row(place(CELL, 99), prompt=f"p{number}") for number in range(4)]
    noted(folder, 4, writes, monkeypatch, lambda results: results.commit(rows, unit))
    assert len(whole_lines(folder / REQUESTS)) == before + 4 and not (folder / RUNNING).exists()
