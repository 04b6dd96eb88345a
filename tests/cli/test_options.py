"""Each flag becomes what the engine knows it by."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from ddtree import SamplingParams, Speculation
from ddtree.cli.options import (
    Mode,
    PairOptions,
    SamplingOptions,
    SpeculationOptions,
    chosen_mode,
    to_sampling_params,
    to_speculation,
)


def test_what_is_not_given_is_the_engines_default() -> None:
    assert to_sampling_params(SamplingOptions()) == SamplingParams()
    assert to_speculation(Mode.tree, SpeculationOptions()) == Speculation("tree")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_new_tokens", 7), ("temperature", 0.7), ("top_p", 0.5), ("top_k", 3), ("min_p", 0.1), ("seed", 9)),
        *(("repetition_penalty", 1.2), ("presence_penalty", 0.3), ("frequency_penalty", -0.4)),
    ],
)
def test_each_sampling_flag_arrives(name: str, value: float) -> None:
    params = to_sampling_params(SamplingOptions(**{name: value}))
    assert params == SamplingParams(**{name: value}) and params != SamplingParams()


def test_stops_arrive_and_no_flag_is_forgotten() -> None:
    assert to_sampling_params(SamplingOptions(stop=["a", "b"])).stop == ("a", "b")
    assert {field.name for field in fields(SamplingOptions)} <= {field.name for field in fields(SamplingParams)}


def test_speculation_flags_arrive() -> None:
    options = SpeculationOptions(budget=5, top_k_cap=2)
    assert to_speculation(Mode.tree, options) == Speculation("tree", budget=5, top_k_cap=2)


@pytest.mark.parametrize(
    ("pair", "asked", "mode"),
    [
        (PairOptions(), None, Mode.tree),  # the demo's pair has a drafter
        (PairOptions(model=Path("m")), None, Mode.ar),
        (PairOptions(model=Path("m"), draft=Path("d")), None, Mode.tree),
        (PairOptions(model=Path("m"), draft=Path("d")), Mode.ar, Mode.ar),
        (PairOptions(), Mode.chain, Mode.chain),
    ],
)
def test_the_mode_follows_from_what_there_is(pair: PairOptions, asked: Mode | None, mode: Mode) -> None:
    assert chosen_mode(pair, SpeculationOptions(mode=asked)) is mode
