"""Which prompts share a prefill, and when they wait for one another."""

from types import SimpleNamespace

import pytest

from ddtree import Engine, SamplingParams, Speculation
from ddtree.engine import scheduler
from ddtree.engine.groups import prefill_groups
from filled_runner import FilledRunner
from tiny_models import make_drafter, make_target


class Filling:
    """Fills chunks up to a power of 2 and batches up to 1, 2, 4 or 8, as graphs do."""

    fills_up = True

    def prefill_rows(self, rows):
        return max(32, 1 << (rows - 1).bit_length())

    def bucket_of(self, batch):
        return 1 << (batch - 1).bit_length()


class Exact(Filling):
    """As plain launches: every chunk at its own length."""

    fills_up = False

    def prefill_rows(self, rows):
        return rows


def waiting(*lengths, **kinds):
    return [
        SimpleNamespace(
            prompt=[0] * n, prefilled=0, shape=SimpleNamespace(budget=kinds.get("budget", 7)),
            constraint=kinds.get("constraint"),
        )
        for n in lengths
    ]  # fmt: skip


def shared(prompts, runner, prefill_tokens=512):
    groups = prefill_groups(prompts, prefill_tokens, runner, Exact())
    assert sorted(id(s) for group in groups for s in group) == sorted(map(id, prompts))
    return sorted(sorted(len(s.prompt) for s in group) for group in groups)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((100, 120, 60, 70), [[60, 70, 100, 120]]),
        ((250, 20), [[20, 250]]),  # 512 rows, 288 of them filled
        ((250, 20, 20), [[20], [20, 250]]),  # 1,024 rows would be filled by 320
        ((512, 512, 512), [[512], [512, 512]]),  # 1,024 rows a launch
        ((30,) * 7, [[30] * 7]),
    ],
)
def test_prompts_share_a_launch_that_is_at_least_half_full(lengths, expected):
    assert shared(waiting(*lengths), Filling()) == expected


def test_where_chunks_are_not_filled_up_only_equal_ones_share():
    assert shared(waiting(5, 9, 5), Exact()) == [[5, 5], [9]]


def test_what_ends_drafts_or_is_constrained_otherwise_runs_apart():
    prompts = waiting(40, 600) + waiting(40, budget=0) + waiting(40, constraint="a grammar")
    assert shared(prompts, Filling()) == [[40], [40], [40], [600]]


def test_prompts_wait_for_company_while_many_decode(tmp_path, monkeypatch):
    """Two rounds at most, and the answers are the same."""
    target = make_target(tmp_path / "target", "llama", eos_token_id=None)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=6)
    prompts = [[4 + (7 * i + j) % 50 for j in range(3 + i)] for i in range(8)]
    params = [SamplingParams(max_new_tokens=10 + 3 * i) for i in range(8)]

    class Overlapping(FilledRunner):
        overlaps = True

    answers, launches = [], []
    for crowd in (2, 10**6):
        monkeypatch.setattr(scheduler, "CROWD", crowd)
        engine = Engine.load(target, drafter, dtype="float32", max_model_len=96, max_batch=4)
        engine._runner = engine._scheduler._runner = Overlapping(engine.state, engine.target, engine.drafter)
        done = engine.generate(prompts, params, speculation=Speculation("tree", 8))
        answers.append([c.token_ids for c in done])
        launches.append(engine._runner.batches)
    assert answers[0] == answers[1]
    assert [len(tokens) for tokens in answers[0]] == [p.max_new_tokens for p in params]
    assert sum(launches[0]) == sum(launches[1]) == 8
    assert len(launches[0]) < len(launches[1])
