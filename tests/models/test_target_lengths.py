"""Rope types whose angles depend on the text's length, before, across and beyond the original length."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from target_runner import TargetRunner
from tiny_models import make_target, reference_model

ORIGINAL = 32
TOLERANCE = 1e-4
SETTINGS: dict[str, dict[str, Any]] = {
    "dynamic": {
        "max_position_embeddings": ORIGINAL,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0},
    },
    "longrope": {
        "max_position_embeddings": 4 * ORIGINAL,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "original_max_position_embeddings": ORIGINAL,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 6.0],
        },
    },
}
PROMPT_LENGTHS = [10, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, ORIGINAL + 20]
TOKENS = torch.randint(0, 61, (80,), generator=torch.Generator().manual_seed(4)).tolist()
TREE_TOKENS = [7, 9, 11, 7, 13, 15, 17, 19]
TREE_PARENTS = [-1, 0, 1, -1, 2, 4, 3, 5]  # six deep


@pytest.fixture(params=SETTINGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_target(tmp_path, "llama", **SETTINGS[request.param])


@torch.no_grad()
def steps_in_transformers(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Logits after the prompt and after each token, from a copy: dynamic angles remember the longest text."""
    model, cache = copy.deepcopy(model), DynamicCache(config=model.config)
    pieces = [prompt, *([t] for t in tokens)]
    return torch.stack([model(torch.tensor([p]), None, None, cache, use_cache=True).logits[0, -1] for p in pieces])


def start(folder: Path, prompt: list[int], cuts: tuple[int, ...] = ()) -> tuple[TargetRunner, torch.Tensor]:
    """A runner behind the prompt, and the logits after it."""
    runner = TargetRunner(folder, len(prompt))
    ends = [*[c for c in cuts if c < len(prompt)], len(prompt)]
    rows = [runner.chain(prompt[a:b])[-1] for a, b in zip([0, *ends], ends, strict=False)]
    return runner, rows[-1]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max() <= TOLERANCE


@pytest.mark.parametrize("prompt_tokens", PROMPT_LENGTHS)
def test_one_token_a_step_is_generate(folder: Path, prompt_tokens: int) -> None:
    prompt, n_new = TOKENS[:prompt_tokens], 27
    wanted = reference_model(folder).generate(
        torch.tensor([prompt]), max_new_tokens=n_new, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    answer = wanted.sequences[0, prompt_tokens:].tolist()
    theirs = torch.cat(wanted.logits)
    for cuts in ((), (5, 6, 30)):
        runner, after_prompt = start(folder, prompt, cuts)
        ours = torch.stack([after_prompt, *(runner.chain([t])[-1] for t in answer[:-1])])
        assert_close(ours, theirs)


@pytest.mark.parametrize("committed", [ORIGINAL - 8, ORIGINAL - 3, ORIGINAL, ORIGINAL + 9])
@pytest.mark.parametrize("prompt_tokens", [10, ORIGINAL + 4])
def test_tree_rows_are_rows_of_single_steps(folder: Path, prompt_tokens: int, committed: int) -> None:
    """Nodes on both sides of the original length, in one tree."""
    prompt, more = TOKENS[:prompt_tokens], TOKENS[prompt_tokens:committed]
    model = reference_model(folder)
    runner, _ = start(folder, prompt)
    for token in more:
        runner.chain([token])
    rows = runner.tree(TREE_TOKENS, TREE_PARENTS)
    for node in range(len(TREE_TOKENS)):
        path, parent = [], node
        while parent >= 0:
            path.insert(0, TREE_TOKENS[parent])
            parent = TREE_PARENTS[parent]
        assert_close(rows[node], steps_in_transformers(model, prompt, more + path)[-1])
        single, _ = start(folder, prompt)
        assert_close(rows[node], [single.chain([t])[-1] for t in more + path][-1])


def test_the_original_length_matters(folder: Path) -> None:
    """The cases above could not fail if the angles did not change there."""
    model = reference_model(folder)
    prompt, more = TOKENS[:10], TOKENS[10 : ORIGINAL + 9]
    stepwise = steps_in_transformers(model, prompt, more)[-1]
    with torch.no_grad():
        whole = copy.deepcopy(model)(torch.tensor([prompt + more])).logits[0, -1]
    assert (stepwise - whole).abs().max() > 100 * TOLERANCE
