"""What a GPU captures before its server is ready, on a runner that only notes what it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree import Engine, Speculation
from ddtree.engine.runner import EagerRunner
from ddtree.engine.state import SamplingFlags
from ddtree.engine.warm_up import SAMPLINGS
from ddtree.errors import UserError
from tiny_models import make_drafter, make_target


class Noting(EagerRunner):
    """Has batch sizes and prompt sizes as graphs have them; runs everything, on the CPU."""

    overlaps = True

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.rounds: set[Any] = set()
        self.prefills: set[Any] = set()

    def bucket_of(self, batch: int) -> int:
        return next(size for size in (1, 2, 4, 6) if size >= batch)

    def prefill_rows(self, rows: int) -> int:
        return max(32, 1 << (rows - 1).bit_length())

    def measure(self, bucket: int, shape: Any, flags: SamplingFlags) -> float:
        self.rounds.add((bucket, shape.budget, flags.any_sampled))
        return 1.0

    def prefill(self, slots: Any, chunks: Any, kind: Any, bound: int) -> Any:
        self.prefills.add((len(slots), self.prefill_rows(len(chunks[0])), kind.is_last, kind.flags.any_sampled))
        return super().prefill(slots, chunks, kind, bound)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    target = make_target(folder / "target", "llama", eos_token_id=None)
    return target, make_drafter(folder / "drafter", target, block_size=6)


def noting(folders: tuple[Path, Path], speculation: Speculation) -> tuple[Engine, Noting]:
    engine = Engine.load(
        *folders, dtype="float32", max_model_len=200, max_batch=6, prefill_tokens=100,
        speculation=Speculation("tree", 3),
    )  # fmt: skip
    engine.speculation = speculation
    runner = Noting(engine.state, engine.target, engine.drafter)
    engine._runner = engine._scheduler._runner = runner
    engine._scheduler._policy.cost_ms.clear()
    return engine, runner


@pytest.mark.parametrize("speculation", [Speculation("tree"), Speculation("tree", 9), Speculation("ar")], ids=str)
def test_every_batch_size_is_set_up(folders: tuple[Path, Path], speculation: Speculation) -> None:
    engine, runner = noting(folders, speculation)
    told: list[tuple[str, float]] = []
    engine.warm_up_batches(lambda stage, progress: told.append((stage, progress)))
    budgets = (0, 3, 7, 15, 31, 63, 127) if speculation.mode == "tree" and speculation.budget is None else None
    budgets = budgets or (speculation.budget or 0,)
    assert runner.rounds == {(b, n, sampled) for b in (1, 2, 4, 6) for n in budgets for sampled in (True, False)}
    assert {(batch, rows) for batch, rows, *_ in runner.prefills} == {
        (b, r) for b in (1, 2, 4, 6) for r in (32, 64, 128)
    }
    assert {sampled for *_, sampled in runner.prefills} == {flags.any_sampled for flags in SAMPLINGS}
    assert {rows for _, rows, is_last, _ in runner.prefills if not is_last} == {128}
    fractions = [progress for _, progress in told]
    assert fractions == sorted(fractions) and fractions[0] == 0 and 0.9 < fractions[-1] < 1
    assert "capturing rounds of a batch of 6" in dict(told)
    assert engine.state.committed[:-1].sum() == 0 and engine.occupancy().cache_tokens_used == 0


def test_too_little_memory_is_told_in_one_line(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = noting(folders, Speculation("tree", 9))

    def full(*_: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner, "measure", full)
    with pytest.raises(UserError, match="no memory left for rounds of a batch of 1: lower the memory fraction"):
        engine.warm_up_batches(lambda stage, progress: None)


def test_a_cpu_has_nothing_to_capture(folders: tuple[Path, Path]) -> None:
    engine = Engine.load(*folders, dtype="float32", max_model_len=64, speculation=Speculation("tree", 3))
    told: list[str] = []
    engine.warm_up_batches(lambda stage, progress: told.append(stage))
    assert told == []
