"""The drafter's logits against a plain, cache-free one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddtree.demo import drafter_folder
from ddtree.demo.target import target_folder
from ddtree.engine.round import draft, inject_taps
from ddtree.models.drafter import Drafter, load_drafter
from ddtree.models.target import Target, load_target
from plain_dflash import PlainDrafter
from tiny_models import edit_config, make_drafter, make_target

TOLERANCE = 1e-4
PAGE_TOKENS, MAX_TOKENS = 4, 96


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("t"), "llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def target(target_path: Path) -> Target:
    return load(target_path)


def load(folder: Path) -> Target:
    return load_target(folder, torch.float32, torch.device("cpu"))


class Bench:
    """Sequences with given taps on a drafter, their pages scattered over the cache."""

    def __init__(self, drafter: Drafter, lengths: list[int], draft_window: int | None = None) -> None:
        n, table_pages, config = len(lengths), MAX_TOKENS // PAGE_TOKENS, drafter.config
        self.drafter, self.lengths = drafter, lengths
        generator = torch.Generator().manual_seed(9)
        width = len(config.tap_layers) * config.layer.hidden_size
        self.taps = [3 * torch.randn(length, width, generator=generator) for length in lengths]
        self.roots = torch.randint(0, drafter.target.config.vocab_size, (n,), generator=generator)
        self._pages = (torch.randperm(n * table_pages, generator=generator) + 1).view(n, table_pages)
        shape = (
            config.n_layers,
            2,
            (n * table_pages + 1) * PAGE_TOKENS,
            config.layer.n_kv_heads,
            config.layer.head_dim,
        )
        # What is read without having been written shows.
        self._state: Any = SimpleNamespace(
            drafter_cache=torch.full(shape, 1e3),
            page_tokens=PAGE_TOKENS,
            draft_window=draft_window,
            row_numbers=lambda n, rows: torch.arange(rows).expand(n, -1),
            block_sees=lambda n: torch.ones(n, config.block_size, config.block_size, dtype=torch.bool),
        )

    def _batch(self, slots: list[int]) -> Any:
        committed = [self.lengths[slot] for slot in slots]
        return SimpleNamespace(
            slots=torch.tensor(slots),
            block_table=self._pages[slots],
            committed=torch.tensor(committed),
            roots=self.roots[slots],
            prompt_tokens=torch.ones(len(slots), dtype=torch.int64),
            context_bound=max(committed),
        )

    def inject(self, pieces: int = 1) -> None:
        """Each sequence by itself, in so many pieces."""
        for slot, taps in enumerate(self.taps):
            for part in torch.arange(len(taps)).chunk(pieces):
                self.write([slot], taps[part][None], part[:1], torch.tensor([len(part)]))

    def write(self, slots: list[int], taps: torch.Tensor, base: torch.Tensor, valid: torch.Tensor) -> None:
        inject_taps(self._state, self._batch(slots), self.drafter, taps, base, valid)

    def draft(self, slots: list[int]) -> torch.Tensor:
        return draft(self._state, self._batch(slots), self.drafter)


def check(
    drafter_path: Path,
    target: Target,
    lengths: list[int],
    *,
    draft_window: int | None = None,
    sliding_is_causal: bool = False,
    block_size: int | None = None,
) -> None:
    sliding_block = "causal" if sliding_is_causal else "bidirectional"
    drafter = load_drafter(drafter_path, target, block_size=block_size, sliding_block=sliding_block)
    plain = PlainDrafter(
        drafter_path,
        target.embedding,
        target.head,
        block_size=block_size,
        draft_window=draft_window,
        sliding_is_causal=sliding_is_causal,
    )
    bench = Bench(drafter, lengths, draft_window)
    wanted = torch.stack([plain.logits(t, r) for t, r in zip(bench.taps, bench.roots.tolist(), strict=True)])
    assert wanted.std() > 0.3, "the test model says nothing"
    bench.inject()
    everyone = list(range(len(lengths)))
    assert (bench.draft(everyone) - wanted).abs().max() <= TOLERANCE
    again = torch.cat([bench.draft([slot]) for slot in everyone])  # the block's own rows were only scratch
    assert (again - wanted).abs().max() <= TOLERANCE


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
CASES: dict[str, dict[str, Any]] = {
    "full attention": {},
    "biases": {"attention_bias": True},
    "causal": {"is_causal": True},
    "one layer": {"n_layers": 1},
    "three taps, not in order": {"taps": [4, 0, 2]},
    "one tap": {"taps": [3]},
    "many heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 300.0},
    "new rope keys": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_theta": None},
    "window longer than the text": {**SLIDING, "sliding_window": 50},
    "window": {**SLIDING, "sliding_window": 12},
    "window shorter than the block": {**SLIDING, "sliding_window": 3},
    "window in both layers": {**SLIDING, "layer_types": ["sliding_attention"] * 2, "sliding_window": 9},
    "causal with a window": {**SLIDING, "sliding_window": 9, "is_causal": True},
}


@pytest.mark.parametrize("case", CASES)
def test_kinds_of_drafters(case: str, target_path: Path, target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(tmp_path, target_path, **CASES[case])
    check(drafter, target, [21, 1, 34])
    if "window" in case:
        check(drafter, target, [21, 1, 34], sliding_is_causal=True)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_on_targets_of_other_families(family: str, tmp_path: Path) -> None:
    """The embedding and the head are the target's, tied or not."""
    path = make_target(tmp_path / "t", family, tie_word_embeddings=family == "qwen3", num_hidden_layers=4)
    check(make_drafter(tmp_path / "d", path), load(path), [13])


@pytest.mark.parametrize("block_size", [2, 3, 5, 8, 16])
def test_block_sizes(block_size: int, target_path: Path, target: Target, tmp_path: Path) -> None:
    """The checkpoint's own, and one that the user asks for."""
    check(make_drafter(tmp_path / "own", target_path, block_size=block_size), target, [10, 23])
    check(make_drafter(tmp_path / "other", target_path, block_size=7), target, [10, 23], block_size=block_size)


@pytest.mark.parametrize("window", [1, 5, 20, 33, 60])
@pytest.mark.parametrize("case", ["full attention", "window"])
def test_draft_window(case: str, window: int, target_path: Path, target: Target, tmp_path: Path) -> None:
    """Counted back from the block's start, in every layer, on top of any sliding window."""
    drafter = make_drafter(tmp_path, target_path, **CASES[case])
    check(drafter, target, [20, 33, 4], draft_window=window)
    check(drafter, target, [33], draft_window=window)


def test_injection_in_pieces_is_injection_at_once(target_path: Path, target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(make_drafter(tmp_path, target_path), target)
    logits = []
    for pieces in (1, 2, 7, 30):
        bench = Bench(drafter, [30, 17])
        bench.inject(pieces)
        logits.append(bench.draft([0, 1]))
    assert all((other - logits[0]).abs().max() <= 1e-5 for other in logits[1:])


def test_rows_marked_invalid_are_not_injected(target_path: Path, target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(make_drafter(tmp_path, target_path), target)
    bench = Bench(drafter, [12, 12])
    bench.inject()
    wanted = bench.draft([0, 1])
    junk = torch.full((2, 5, bench.taps[0].shape[-1]), 7.0)
    bench.write([0, 1], junk, torch.tensor([3, 3]), torch.tensor([0, 0]))
    assert torch.equal(bench.draft([0, 1]), wanted)


def test_default_taps_are_the_written_formula(target_path: Path, target: Target, tmp_path: Path) -> None:
    """A checkpoint without tap numbers computes what the same checkpoint with z-lab's numbers written down does."""
    drafter = make_drafter(tmp_path, target_path, taps=[1, 3])
    named = Bench(load_drafter(drafter, target), [14])
    edit_config(drafter, dflash_config={"mask_token_id": 3})
    silent = Bench(load_drafter(drafter, target), [14])
    assert silent.drafter.config.tap_layers == named.drafter.config.tap_layers == (1, 3)
    for bench in (named, silent):
        bench.inject()
    assert torch.equal(silent.draft([0]), named.draft([0]))


@pytest.mark.parametrize("draft_window", [None, 16])
def test_the_shipped_drafter(draft_window: int | None) -> None:
    target = load(target_folder())
    check(drafter_folder(), target, [40], draft_window=draft_window)
