"""Which sealed measurement a restored service is held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.made_rows import write_run
from ddtree.bench.sweep.toml_text import toml_text
from ddtree.deploy import to_deployment
from ddtree.deploy.render import render
from ddtree.kit.canary import choose_canary
from ddtree.kit.experiments import write_experiments
from ddtree.kit.record import KitRecord

SEALED: dict[str, Any] = {
    "engine": {"kind": "native"},
    "model": {"path": "/models/target"},
    "drafter": {"path": "/models/drafter"},
    "speculation": {"algorithm": "ddtree", "budget": 8, "draft_temperature": 0.8, "draft_window": 512},
    "service": {"name": "s", "port": 8000},
}


@pytest.mark.parametrize(
    ("variant", "changes", "fits"),
    [
        ("tree:8", {}, True),
        ("tree:32", {"budget": 16}, True),
        ("tree:8", {"draft_temperature": 1.0}, False),
        ("tree:8", {"draft_temperature": None}, False),
        ("chain", {"draft_temperature": 1.0}, True),
        ("chain", {"draft_window": 64}, False),
        ("tree:8", {"draft_window": 64}, False),
        ("tree:8", {"block_size": 8}, False),
        ("ar", {"draft_temperature": 1.0, "draft_window": None}, True),
    ],
)
def test_what_only_a_start_can_change_must_be_as_it_was(
    tmp_path: Path, variant: str, changes: dict[str, Any], fits: bool
) -> None:
    """A kit without prompts says of a measurement that fits that these are missing."""
    text = toml_text(SEALED)
    write_run(tmp_path / "bench/results/run", {("w", None, 1, variant): {}}, session={"deployment_text": text})
    experiments = write_experiments(tmp_path, ["bench/results/run"])
    speculation = {key: value for key, value in (SEALED["speculation"] | changes).items() if value is not None}
    deployment = to_deployment(SEALED | {"speculation": speculation})
    kit = KitRecord.model_construct(experiments=experiments)
    told = choose_canary(tmp_path, kit, deployment, render(deployment).command)
    wanted = "the prompts of w are not in the kit" if fits else "no complete measurement of what this service can be"
    assert isinstance(told, str) and told.startswith(wanted)
