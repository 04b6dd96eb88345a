"""Faults of other engines' drafters (numbers of the design): each check passes, and fails with the fault put back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree import Speculation
from ddtree.errors import UserError
from ddtree.models import drafter_config
from ddtree.models.drafter import Drafter, load_drafter
from ddtree.models.target import Hidden, Target, load_target
from ddtree.models.target_config import read_sliding_windows
from pairs import Pair, assert_same, chat_tokens, greedy, make_pair, real_pair
from tiny_models import edit_config, load_weights, make_drafter, make_target, read_config, save_weights

QUESTIONS = (
    "Write a Python function that counts the vowels in a word.",
    "A train goes 60 miles in 2 hours. How far does it go in 5 hours? Think step by step.",
)


@pytest.fixture(scope="module")
def smollm2() -> Pair:
    return real_pair()


def chain_rounds(pair: Pair) -> int:
    """Rounds that two answers of 48 tokens take with the real pair; 23 when all is well."""
    engine = pair.engine(max_model_len=160, max_batch=2)
    prompts = [chat_tokens(pair, question) for question in QUESTIONS]
    answers = engine.generate(prompts, greedy(48), speculation=Speculation("chain"))
    return sum(answer.stats.rounds for answer in answers)


@pytest.fixture(scope="module")
def healthy_rounds(smollm2: Pair) -> int:
    return chain_rounds(smollm2)


def equals_the_oracle(pair: Pair, n_new: int = 24, **options: Any) -> bool:
    prompt = [4, 5, 6, 7, 8, 9, 5, 4]
    (ours,) = pair.engine(**options).generate(
        [prompt], greedy(n_new), speculation=Speculation("tree", 7), record_trees=True
    )
    try:
        assert_same(ours, pair.plain().answer(prompt, n_new, budget=7, top_k=7))
    except AssertionError:
        return False
    return True


def put_back_a_masked_root(patch: pytest.MonkeyPatch) -> None:
    draft = Drafter.draft

    def masked(self: Drafter, roots: torch.Tensor, *others: Any) -> torch.Tensor:
        return draft(self, torch.full_like(roots, self.config.mask_token_id), *others)

    patch.setattr(Drafter, "draft", masked)


def test_trap_2_the_root_stands_in_slot_0(
    smollm2: Pair, healthy_rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = make_pair(tmp_path)
    assert equals_the_oracle(tiny)
    assert healthy_rounds <= 26
    put_back_a_masked_root(monkeypatch)
    assert not equals_the_oracle(tiny)
    assert chain_rounds(smollm2) > 2 * healthy_rounds


def put_back_shifted_taps(patch: pytest.MonkeyPatch, by: int) -> None:
    forward = Target.forward

    def shifted(self: Target, tokens: Any, run: Any, cache: Any, tap_layers: tuple[int, ...] = ()) -> Hidden:
        return forward(self, tokens, run, cache, tuple(i + by for i in tap_layers))

    patch.setattr(Target, "forward", shifted)


@pytest.mark.parametrize("by", [-1, 1])
def test_trap_3_taps_are_outputs_of_the_named_layers(
    by: int, smollm2: Pair, healthy_rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = make_pair(tmp_path, taps=[1, 2])
    assert equals_the_oracle(tiny)
    put_back_shifted_taps(monkeypatch, by)
    assert not equals_the_oracle(tiny)
    assert chain_rounds(smollm2) > healthy_rounds  # merely lower acceptance: nobody would notice


@pytest.mark.parametrize("rows", [60, 64], ids=["pruned", "padded"])
def test_trap_4_vocabularies_are_compared_at_load(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter(tmp_path / "drafter", make_target(tmp_path / "target", "llama"))
    other = make_target(tmp_path / "other", "llama")
    weights = load_weights(other)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat((weights[name], weights[name]))[:rows]
    save_weights(edit_config(other, vocab_size=rows), weights)
    target = load_target(other, torch.float32, torch.device("cpu"))
    with pytest.raises(UserError, match=f"vocab_size 61, the target has {rows}"):
        load_drafter(drafter, target)
    monkeypatch.setattr(drafter_config, "_check_fit", lambda *_: None)
    load_drafter(drafter, target)  # no error any more, and tokens that the other model does not have


def put_back_full_attention(patch: pytest.MonkeyPatch) -> None:
    def all_full(*args: Any) -> tuple[None, ...]:
        return (None,) * len(read_sliding_windows(*args))

    patch.setattr(drafter_config, "read_sliding_windows", all_full)


def test_trap_6_sliding_layers_slide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliding = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}
    short = make_pair(tmp_path / "short", sliding_window=9, **sliding)
    long = make_pair(tmp_path / "long", sliding_window=60, **sliding)
    assert equals_the_oracle(short) and equals_the_oracle(long)
    put_back_full_attention(monkeypatch)
    assert equals_the_oracle(long)  # nothing is seen before the text is longer than the window
    assert not equals_the_oracle(short)


def test_trap_7_keys_are_read(tmp_path: Path) -> None:
    """A checkpoint with blocks of 5 drafts blocks of 5, wherever its config says so; run as 8 it differs."""
    pair = make_pair(tmp_path, block_size=5)
    assert equals_the_oracle(pair)
    assert not equals_the_oracle(pair, block_size=8)
    inner = {**read_config(pair.drafter)["dflash_config"], "block_size": 5}
    edit_config(pair.drafter, remove=("block_size",), dflash_config=inner)
    drafter = pair.engine().drafter
    assert drafter is not None and drafter.config.block_size == 5
    edit_config(pair.drafter, dflash_config={**inner, "slot_shift": 1})
    with pytest.raises(UserError, match=r"dflash_config.slot_shift would be ignored"):
        pair.engine()
