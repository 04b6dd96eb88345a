"""Each flag becomes what the engine knows it by."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from ddtree import SamplingParams, Speculation
from ddtree.cli.loading import load_engine
from ddtree.cli.options import (
    Dtype,
    Mode,
    PairOptions,
    SamplingOptions,
    SpeculationOptions,
    chosen_mode,
    parse_budget,
    to_sampling_params,
    to_speculation,
)
from ddtree.demo.progress import silent
from ddtree.errors import UserError
from tiny_models import make_drafter, make_target


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
    options = SpeculationOptions(budget="5", top_k_cap=2)
    assert to_speculation(Mode.tree, options) == Speculation("tree", budget=5, top_k_cap=2)


@pytest.mark.parametrize("text", ["8_0", "٣", "+8", "-8", " 8", "8.0", "", "9" * 6000, "Auto"])
def test_a_budget_is_written_in_plain_digits(text: str) -> None:
    assert parse_budget("080", Mode.tree) == 80
    with pytest.raises(UserError, match=r"--budget is .*: choose auto or a whole number from 1 to 1024"):
        parse_budget(text, Mode.tree)


@pytest.mark.parametrize("budget", ["0", "auto", "many"])
def test_a_chain_is_not_offered_auto(budget: str) -> None:
    with pytest.raises(UserError, match=r"budget is .*: choose a whole number from 1 to 1024"):
        to_speculation(Mode.chain, SpeculationOptions(mode=Mode.chain, budget=budget))


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


def test_pair_options_reach_the_engine(tmp_path: Path) -> None:
    """Every value differs from what the engine takes by itself."""
    target = make_target(tmp_path / "target", "llama")
    drafter = make_drafter(tmp_path / "drafter", target, block_size=8)
    threads = torch.get_num_threads()
    options = PairOptions(
        model=target,
        draft=drafter,
        device="cpu",
        dtype=Dtype.bfloat16,
        block_size=5,
        draft_window=7,
        draft_temperature=0.6,
        max_model_len=48,
        memory_fraction=0.5,
        max_batch=3,
        threads=threads + 1,
    )
    try:
        engine = load_engine(options, Mode.tree, Speculation("tree", 6), silent)
        facts = engine.facts()
        with pytest.raises(UserError, match="GiB may be used"):
            load_engine(replace(options, memory_fraction=1e-9), Mode.tree, Speculation("tree", 6), silent)
    finally:
        torch.set_num_threads(threads)
    wanted = {"device": "cpu", "dtype": "bfloat16", "block_size": 5, "draft_window": 7, "max_model_len": 48}
    wanted |= {"draft_temperature": 0.6}
    wanted |= {"threads": threads + 1, "mode": "tree", "budget": 6, "model": str(target), "draft": str(drafter)}
    assert {name: facts[name] for name in wanted} == wanted
    assert engine.drafter.config.block_size == 5
    assert engine.max_batch == 3
