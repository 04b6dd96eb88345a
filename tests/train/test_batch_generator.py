"""The batch generator writes what the engine writes, whatever its seats and whenever it is looked at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ddtree import Engine, SamplingParams
from ddtree.errors import UserError
from ddtree.models.target import Target, load_target
from ddtree.train.batch_generator import BatchGenerator
from ddtree.train.draws import Draw, Written
from ddtree.train.generation_limits import Limits
from devices import GPU
from tiny_models import make_target

END = 2
LIMITS = Limits(prompt_tokens=20, answer_tokens=30, turn_enders=frozenset({0, 1, 2, 3}), answer_enders=frozenset({END}))
ENDINGS = [[END, 1], [7, 8, END, 1]]


def draws(n: int, seed: int = 0) -> list[Draw]:
    """Given prompts and turns to complete, greedy and sampled, of all lengths that fit."""
    dice = np.random.default_rng(seed)
    found = []
    for number in range(n):
        ending = [None, 0, 1][number % 3]
        longest = LIMITS.prompt_tokens - (len(ENDINGS[ending]) if ending is not None else 0)
        tokens = dice.integers(4, 61, dice.integers(1, longest + 1)).tolist()
        found.append(Draw(number, 0, tokens, ending, [0.0, 0.8][number % 2], 0.9, 1000 + number))
    return found


def write_all(target: Target, wanted: list[Draw], seats: int, steps: int, limits: Limits = LIMITS) -> list[Written]:
    generator, left, done = BatchGenerator(target, limits, ENDINGS, seats), list(wanted), []
    while left or generator.pending:
        n = min(generator.room, len(left))
        generator.give(left[:n])
        left = left[n:]
        generator.run(steps)
        done += generator.collect(keep_running=1)
        if not left and generator.pending:
            done += generator.collect()
    return sorted(done, key=lambda written: written.draw.number)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_answers_are_those_of_the_engine(tmp_path: Path, family: str) -> None:
    engine = Engine.load(make_target(tmp_path, family), dtype="float32", device="cpu", max_batch=45)
    done = write_all(engine.target, draws(45), seats=4, steps=8)
    assert [written.draw.number for written in done] == list(range(45))
    parts = [np.split(written.tokens, [written.answer_start]) for written in done]
    params = [SamplingParams(max_new_tokens=30, temperature=w.draw.temperature, seed=w.draw.seed) for w in done]
    wanted = engine.generate([prompt.tolist() for prompt, _ in parts], params)
    assert [answer.tolist() for _, answer in parts] == [completion.token_ids for completion in wanted]
    assert 0 < sum(answer[-1] == END for _, answer in parts) < 45  # both kinds of ending were tried


def test_turns_that_the_target_completes_are_its_own_samples(tmp_path: Path) -> None:
    """Up to a special token, which gives way to the ending, or up to where the ending must begin to fit."""
    engine = Engine.load(make_target(tmp_path, "llama"), dtype="float32", device="cpu", max_batch=45)
    done, cut = write_all(engine.target, draws(45), seats=5, steps=3), 0
    params = [SamplingParams(max_new_tokens=20, temperature=0.9, seed=w.draw.seed, ignore_eos=True) for w in done]
    samples = engine.generate([list(w.draw.tokens) for w in done], params)
    for written, sample in zip(done, samples, strict=True):
        draw, prompt = written.draw, written.tokens[: written.answer_start].tolist()
        if draw.ending is None:
            assert prompt == draw.tokens
            continue
        ending = ENDINGS[draw.ending]
        assert prompt[-len(ending) :] == ending
        turn = prompt[: -len(ending)]
        own = turn[len(draw.tokens) :]
        assert turn[: len(draw.tokens)] == draw.tokens and own == sample.token_ids[: len(own)]
        assert not LIMITS.turn_enders & set(own)
        if len(prompt) == LIMITS.prompt_tokens:
            cut += 1
        else:
            assert sample.token_ids[len(own)] in LIMITS.turn_enders
    assert 3 < cut < 30


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_captured_steps_write_what_the_engine_writes(tmp_path: Path) -> None:
    engine = Engine.load(
        make_target(tmp_path, "llama"), dtype="float32", device="cuda", max_model_len=64, max_batch=45, graphs="on"
    )
    done = write_all(engine.target, draws(45), seats=7, steps=8)
    assert [written.draw.number for written in done] == list(range(45))
    parts = [np.split(written.tokens, [written.answer_start]) for written in done]
    params = [SamplingParams(max_new_tokens=30, temperature=w.draw.temperature, seed=w.draw.seed) for w in done]
    wanted = engine.generate([prompt.tolist() for prompt, _ in parts], params)
    assert [answer.tolist() for _, answer in parts] == [completion.token_ids for completion in wanted]


def test_a_turn_ends_where_the_target_begins_its_ending(tmp_path: Path) -> None:
    target = load_target(make_target(tmp_path, "llama"), torch.float32, torch.device("cpu"))
    turn = Draw(0, 0, [5, 6], 0, 0.0, 0.9, 1000)
    own = write_all(target, [turn], 1, 8)[0].tokens[2:8].tolist()  # six tokens of what it says by itself
    assert not LIMITS.turn_enders & set(own)
    ending = [*own[2:5], 9, END, 1]
    generator = BatchGenerator(target, LIMITS, [ending], 1)
    generator.give([turn])
    generator.run(60)
    (written,) = generator.collect()
    assert written.tokens[: written.answer_start].tolist() == [5, 6, *own[:2], *ending]


@pytest.mark.parametrize(("seats", "steps"), [(1, 50), (3, 1), (17, 7)])
def test_seats_and_looks_change_nothing(tmp_path: Path, seats: int, steps: int) -> None:
    target = load_target(make_target(tmp_path, "llama"), torch.float32, torch.device("cpu"))
    wanted = write_all(target, draws(30), seats=4, steps=8)
    found = write_all(target, draws(30), seats=seats, steps=steps)
    assert [w.tokens.tolist() for w in found] == [w.tokens.tolist() for w in wanted]
    assert [w.answer_start for w in found] == [w.answer_start for w in wanted]


def test_the_ring_is_never_overfilled(tmp_path: Path) -> None:
    """A conversation keeps its place until it is picked up, however many others were done before it."""
    target = load_target(make_target(tmp_path, "llama"), torch.float32, torch.device("cpu"))
    generator = BatchGenerator(target, LIMITS, ENDINGS, 2)
    room = generator.room
    generator.give(draws(room))
    assert generator.room == 0
    generator.run(80)  # two conversations need no more than 50
    assert generator.room == 0  # finished, not picked up
    n_done = len(generator.collect())
    assert 0 < n_done < room and generator.pending == room - n_done


def test_prompts_whose_rotation_depends_on_their_length_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    target = load_target(make_target(tmp_path, "llama", rope_parameters=rope), torch.float32, torch.device("cpu"))
    with pytest.raises(UserError, match=r"prompts of 20 tokens are beyond the length .*: choose at most 16"):
        BatchGenerator(target, LIMITS, ENDINGS, 2)
