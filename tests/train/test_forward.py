"""The trainable pass says what the engine's models say, for packed conversations and many blocks at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree.models.drafter import load_drafter
from ddtree.models.drafter_config import read_drafter_config
from ddtree.models.target import Target, load_target
from ddtree.train.anchors import draw_anchors, looks_of, plan_depths
from ddtree.train.compiling import plain
from ddtree.train.packing import PackedRows
from ddtree.train.taps import FrozenTarget
from ddtree.train.trainable_drafter import DraftPass, TrainableDrafter
from plain_dflash import PlainDrafter
from target_runner import TargetRunner
from tiny_models import make_drafter, make_target, read_config

TOLERANCE = 1e-4
LENGTHS = ([19, 30, 13], [40, 22])
PROMPTS = 4
ROW_TOKENS, ANCHORS = 64, 12
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
CASES: dict[str, dict[str, Any]] = {
    "full attention": {},
    "biases": {"attention_bias": True},
    "causal": {"is_causal": True},
    "three taps, not in order": {"taps": [4, 0, 2]},
    "many heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 300.0},
    "window": {**SLIDING, "sliding_window": 12},
    "window shorter than the block": {**SLIDING, "sliding_window": 3},
    "causal with a window": {**SLIDING, "sliding_window": 9, "is_causal": True},
}


def packed(vocab_size: int) -> PackedRows:
    generator = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), ROW_TOKENS)
    tokens = torch.randint(4, vocab_size, shape, generator=generator)
    here = torch.arange(ROW_TOKENS).repeat(len(LENGTHS), 1)
    starts, answers, ends = here.clone(), here + 1, here + 1
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            own = slice(at, at + length)
            starts[row, own], answers[row, own], ends[row, own] = at, at + PROMPTS, at + length
            at += length
    return PackedRows(tokens, starts, answers, ends)


def conversations(rows: PackedRows) -> list[tuple[int, int, int]]:
    """Row, start and end of each."""
    found = []
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            found.append((row, at, at + length))
            at += length
    return found


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("qwen3", {}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
                   "max_position_embeddings": 16}),
    ],
    ids=["llama", "sliding window", "normed heads", "rope by length"],
)  # fmt: skip
def test_target_sees_each_conversation_alone(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = make_target(tmp_path, family, **settings)
    target = load_target(folder, torch.float32, torch.device("cpu"))
    rows = packed(target.config.vocab_size)
    seen = FrozenTarget(target, (1, 0), len(LENGTHS), ROW_TOKENS, plain)(rows, says_next=True)
    assert seen.last is not None
    for row, start, end in conversations(rows):
        tokens = rows.tokens[row, start:end].tolist()
        taps = TargetRunner(folder, PROMPTS).taps(tokens, (1, 0))
        logits = TargetRunner(folder, PROMPTS).chain(tokens)
        assert (seen.taps[row, start:end] - taps).abs().max() <= TOLERANCE
        assert (target.logits(seen.last[row, start:end]) - logits).abs().max() <= TOLERANCE


def test_target_stops_at_the_last_tap_where_nobody_asks_what_comes_next(tmp_path: Path) -> None:
    target = load_target(make_target(tmp_path, "llama"), torch.float32, torch.device("cpu"))
    rows = packed(target.config.vocab_size)
    frozen = FrozenTarget(target, (0,), len(LENGTHS), ROW_TOKENS, plain)
    short, whole = frozen(rows, says_next=False), frozen(rows, says_next=True)
    assert short.last is None
    assert torch.equal(short.taps, whole.taps)


@pytest.fixture(scope="module")
def target_folder_6(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("t"), "llama", num_hidden_layers=6)


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_drafted_as_in_the_engine(case: str, target_folder_6: Path, tmp_path: Path) -> None:
    check_blocks(make_drafter(tmp_path, target_folder_6, **CASES[case]), target_folder_6)


@pytest.mark.parametrize("sliding_is_causal", [False, True])
def test_draft_window_and_causal_windows_are_honoured(
    sliding_is_causal: bool, target_folder_6: Path, tmp_path: Path
) -> None:
    folder = make_drafter(tmp_path, target_folder_6, **SLIDING, sliding_window=5)
    check_blocks(folder, target_folder_6, draft_window=7, sliding_is_causal=sliding_is_causal)


def check_blocks(
    folder: Path, target_folder: Path, *, draft_window: int | None = None, sliding_is_causal: bool = False
) -> None:
    """Against the plain drafter of the tests, which `tests/models` holds the engine's drafter to as well."""
    target: Target = load_target(target_folder, torch.float32, torch.device("cpu"))
    config = read_drafter_config(
        folder, target.config, sliding_block="causal" if sliding_is_causal else "bidirectional"
    )
    drafter = TrainableDrafter(config, read_config(folder))
    drafter.read(folder)
    rows = packed(target.config.vocab_size)
    taps = FrozenTarget(target, config.tap_layers, len(LENGTHS), ROW_TOKENS, plain)(rows, says_next=False).taps
    anchors = draw_anchors(rows, ANCHORS, config.block_size - 1, torch.Generator().manual_seed(0))
    draft_pass = DraftPass(drafter, target, len(LENGTHS), ROW_TOKENS, ANCHORS, draft_window, plain)
    depths = config.block_size - 1
    plan = plan_depths(ANCHORS, depths, 1.0)
    everywhere = looks_of(plan.reach.expand(len(LENGTHS), -1), depths, plan.rows)
    logits = target.logits(draft_pass(rows, anchors, everywhere, taps)).view(len(LENGTHS), ANCHORS, depths, -1)
    some = plan_depths(ANCHORS, depths, 0.4)
    looks = looks_of(some.reach.expand(len(LENGTHS), -1), depths, some.rows)
    fewer = target.logits(draft_pass(rows, anchors, looks, taps))
    own_row = torch.arange(len(LENGTHS))[:, None]
    torch.testing.assert_close(fewer, logits[own_row, looks.anchor, looks.depth], rtol=1e-4, atol=1e-5)
    oracle = PlainDrafter(
        folder, target.embedding, target.head, draft_window=draft_window, sliding_is_causal=sliding_is_causal
    )
    assert anchors.valid.all()
    for row in range(len(LENGTHS)):
        for n, root in enumerate(anchors.index[row].tolist()):
            start = int(rows.starts[row, root])
            wanted = oracle.logits(taps[row, start:root], int(rows.tokens[row, root]))
            assert wanted.std() > 0.1, "the test model says nothing"
            assert (logits[row, n] - wanted).abs().max() <= TOLERANCE


def test_a_saved_drafter_loads_in_the_engine_with_the_same_weights(target_folder_6: Path, tmp_path: Path) -> None:
    folder = make_drafter(tmp_path / "old", target_folder_6, attention_bias=True)
    target = load_target(target_folder_6, torch.bfloat16, torch.device("cpu"))
    drafter = TrainableDrafter(read_drafter_config(folder, target.config), read_config(folder))
    drafter.read(folder)
    drafter.save(tmp_path / "new")
    old, new = load_drafter(folder, target), load_drafter(tmp_path / "new", target)
    assert torch.equal(old.fuse, new.fuse)
    assert torch.equal(old.final_norm, new.final_norm)
    for before, after in zip(old.layers, new.layers, strict=True):
        for name, value in vars(before).items():
            assert value is None or torch.equal(value, getattr(after, name)), name
