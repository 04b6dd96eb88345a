"""A tiny target teaches a tiny drafter, which the real engine then accepts from."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from ddtree.errors import UserError
from ddtree.train.acceptance import EvaluationRequest, evaluate_drafter
from ddtree.train.card_facts import read_card_facts
from ddtree.train.run import Outcome, RunOptions, train
from ddtree.train.run_folder import RunState
from ddtree.train.settings import TrainSettings, checked_settings
from ddtree.train.step_times import StepTimes
from ddtree.train.watching import Watcher
from train.markov import make_data, make_markov_target, write_prompts

BLOCK, UNTRAINED = 8, 1.3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_markov_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("text") / "data", target)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "words.jsonl", 12, seed=99)


def settings(target: Path, data: Path, steps: int, **changes: object) -> TrainSettings:
    return checked_settings(
        {
            "target": target,
            "data": (data,),
            "drafter": {"layers": 2, "block_size": BLOCK, "tap_layers": (0, 2)},
            "batch": {"rows": 4, "row_tokens": 128, "anchors_per_row": 48},
            "optimization": {"matrix_rate": 0.02},
            "schedule": {"steps": steps},
            "held_out": {"conversations": 16},
            "device": "cpu",
            "dtype": "float32",
            **changes,
        }
    )


def trained(folder: Path, settings: TrainSettings, watcher: Watcher | None = None) -> Outcome:
    return train(settings, RunOptions(folder=folder), watcher or Watcher())


def tau(target: Path, drafter: Path, prompts: Path, plan: int | str = "chain") -> float:
    request = EvaluationRequest(
        model=target,
        draft=drafter,
        prompts=(prompts,),
        plans=(plan,),
        max_new_tokens=128,
        device="cpu",
        dtype="float32",
    )  # type: ignore[arg-type]
    return evaluate_drafter(request, lambda stage, fraction: None).rows[0].tau


def test_a_tiny_drafter_learns_its_target(target: Path, data: Path, prompts: Path, tmp_path: Path) -> None:
    before = trained(tmp_path / "untrained", settings(target, data, 1))
    after = trained(tmp_path / "run", settings(target, data, 250))
    assert before.finished and after.finished
    assert tau(target, before.drafter, prompts) < UNTRAINED
    assert tau(target, after.drafter, prompts) > 3
    assert tau(target, after.drafter, prompts, 16) > 3


def test_a_run_writes_down_what_it_sees(target: Path, data: Path, prompts: Path, tmp_path: Path) -> None:
    looks = {"conversations": 16, "every_steps": 15, "tau_prompts": (prompts,), "tau_count": 2, "tau_every": 2}
    told: list[tuple[int, dict[str, float]]] = []
    watcher = Watcher(on_tau=lambda step, tau: told.append((step, tau)))
    folder = tmp_path / "run"
    outcome = trained(folder, settings(target, data, 35, held_out=looks), watcher)
    held_out = rows(folder / "held_out.csv")
    # Looks at the clock come after step 1 and every 10 steps; the first 15 steps after the last look are over then.
    assert [row["step"] for row in held_out] == ["21", "35"]
    assert float(held_out[-1]["loss"]) < float(held_out[0]["loss"])
    assert {f"{name}_{depth}" for name in ("token_loss", "divergence", "hits") for depth in range(1, BLOCK)} < set(
        held_out[0]
    )
    assert [step for step, _ in told] == [35]
    assert told[0][1]["words, chain"] == pytest.approx(tau(target, outcome.drafter, first(prompts, 2)), rel=1e-6)
    assert [row["prompts"] for row in rows(folder / "tau.csv")] == ["words, chain", "words, 64"]
    (last,) = rows(folder / "log.csv")[-1:]
    assert last["step"] == "35" and float(last["progress"]) == 1 and float(last["anchors_s"]) > 0
    times = StepTimes.model_validate_json((folder / "step_times.json").read_text())
    assert times.steps == 10
    assert set(times.parts_ms) == {"target", "drafter", "head and loss", "backward", "optimizer"}
    assert 0 < sum(times.parts_ms.values()) <= times.step_ms
    state = RunState.model_validate_json((folder / "state.json").read_text())
    assert state.finished and state.step == 35 and state.anchors == 35 * 4 * 48
    facts = read_card_facts(outcome.drafter)
    assert facts is not None and facts.run.held_out_hits == pytest.approx(state.held_out_hits)
    assert facts.settings["target"] == target.name, "no paths in what is published"
    assert "35" in (outcome.drafter / "README.md").read_text()


def test_a_run_that_is_through_is_left_alone(target: Path, data: Path, tmp_path: Path) -> None:
    folder, wanted = tmp_path / "run", settings(target, data, 2)
    trained(folder, wanted)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name not in ("settings.json",)}
    again = train(wanted, RunOptions(folder=folder, resume=True), Watcher())
    assert again.finished and again.step == 2
    after = {path: path.stat().st_mtime_ns for path in before}
    assert {path.name for path in before if before[path] != after[path]} <= {"basis.json"}


def test_a_loss_that_is_not_finite_ends_the_run(target: Path, data: Path, tmp_path: Path) -> None:
    wild = {"matrix_rate": 1e30, "vector_rate": 1e30, "warm_up_share": 0.0}
    with pytest.raises(UserError, match="the loss is not finite at step"):
        trained(tmp_path / "run", settings(target, data, 30, optimization=wild))


def test_a_run_that_is_refused_leaves_its_folder_free(target: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="are to be held out"):
        trained(tmp_path / "run", settings(target, data, 2, held_out={"conversations": 10**6}))
    assert list((tmp_path / "run").iterdir()) == []
    assert trained(tmp_path / "run", settings(target, data, 2)).finished


def test_text_that_grew_is_not_gone_on_with(target: Path, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", target, count=30, answer_tokens=12)
    wanted = settings(target, data, 5)
    train(wanted, RunOptions(folder=tmp_path / "run", stop_after_s=0.001), Watcher())
    facts = data / "data.json"
    facts.write_text(facts.read_text().replace('"n_draws": 30', '"n_draws": 31'))
    with pytest.raises(UserError, match="changed since the run began"):
        train(wanted, RunOptions(folder=tmp_path / "run", resume=True), Watcher())


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def first(prompts: Path, count: int) -> Path:
    path = prompts.with_name("few") / prompts.name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(prompts.read_text().splitlines(keepends=True)[:count]))
    return path
