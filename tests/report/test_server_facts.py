"""A report of a server whose account of itself has another shape than ours."""

from __future__ import annotations

import pytest

from bench.made_rows import write_run
from ddtree.report.results import read_results
from ddtree.report.roofline import known_bandwidth
from ddtree.report.server_facts import server_facts


@pytest.mark.parametrize(
    ("told", "lines"),
    [
        ({"effective": 1}, ["effective = 1"]),
        ({"effective": {"engine": ["x"]}}, ["effective.engine = x"]),
        ({"effective": {"²": 1, "10": 2}}, ["effective.10 = 2", "effective.² = 1"]),
        ({"effective": {"2": 1, "10": 2}}, ["effective = 2: 1, 10: 2"]),
    ],
)
def test_facts_of_any_shape(tmp_path, told, lines):
    session = {"server_facts": {"/server_info": told}}
    results = read_results(
        [write_run(tmp_path / "run", {("w", None, 1, "ar"): {}}, gpus=[{"name": "NVIDIA H200"}], session=session)]
    )
    assert server_facts(results.sessions) == lines
    assert known_bandwidth(results)[0] == 4800.0
