"""What becomes an experiment of a kit: measured configurations, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.made_rows import write_run
from ddtree.bench.result_folder import REQUESTS, read_requests
from ddtree.bench.sweep.store import PointRow, append_point
from ddtree.errors import UserError
from ddtree.kit.experiments import copy_results, write_experiments
from ddtree.kit.mask import MASK, Masker
from ddtree.kit.record import EXPERIMENT, ExperimentRecord, read_record


def test_points_that_do_not_count_are_no_experiments(tmp_path: Path) -> None:
    """Of a sweep an invalid point, and a server that broke and was measured again, are results and no more."""
    sweep = tmp_path / "bench" / "results" / "sweep"
    cells = {("w", None, 1, variant): {"tok_s": 50.0} for variant in ("ar", "tree:8")}
    write_run(sweep / "points" / "one", cells)
    write_run(sweep / "points" / "broken", cells)
    (sweep / "sweep.json").write_text("{}")
    for variant, status in (("ar", "measured"), ("tree:8", "invalid")):
        append_point(
            sweep,
            PointRow(
                sweep_id="s",
                point=variant,
                settings={},
                status=status,  # type: ignore[arg-type]
                folder="points/one",
                variant=variant,
                finished_at=1.0,
                duration_s=1.0,
            ),
        )
    (identity,) = write_experiments(tmp_path, ["bench/results/sweep"])
    record = read_record(ExperimentRecord, tmp_path / "experiments" / identity / EXPERIMENT)
    assert record.variant == "ar" and record.results == "bench/results/sweep/points/one"


def test_a_run_of_no_sweep_is_one_for_each_variant(tmp_path: Path) -> None:
    write_run(tmp_path / "bench" / "results" / "run", {("w", None, 1, v): {} for v in ("ar", "tree:8")})
    assert len(write_experiments(tmp_path, ["bench/results/run"])) == 2


def test_a_part_of_a_sweep_is_refused(tmp_path: Path) -> None:
    """Away from its sweep nothing would tell that a point does not count."""
    folder = write_run(tmp_path / "sweep" / "points" / "one", {("w", None, 1, "ar"): {}})
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    with pytest.raises(UserError, match="give the sweep's folder"):
        copy_results([folder], tmp_path / "payload", Masker())
    assert not (tmp_path / "payload").exists()


@pytest.mark.parametrize("word", ["hunter2x", "a-very-long-password-of-many-letters-123"])
def test_results_with_secrets_in_their_answers_are_read_whole(tmp_path: Path, word: str) -> None:
    """Lines that grew or shrank as a secret was taken out are rows all the same."""
    folder = write_run(tmp_path / "run", {("w", None, 1, "ar"): {}})
    rows = [json.loads(line) for line in (folder / REQUESTS).read_text().splitlines()]
    (folder / REQUESTS).write_text("".join(json.dumps(row | {"text": f"password={word}"}) + "\n" for row in rows))
    (place,) = copy_results([folder], tmp_path / "payload", Masker())
    copied = read_requests(tmp_path / "payload" / place)
    assert len(copied) == len(rows) and {row.text for row in copied} == {f"password={MASK}"}
