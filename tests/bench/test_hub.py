"""Workloads from the hub by name, through the real library: from folders laid out as the hub lays these sets out.

A folder of the repository's name beside the caller is what the library then loads, with the same configurations, splits
and columns as the sets' cards tell, so that a wrong one of them fails here. What the hub itself holds is not asked.
"""

from __future__ import annotations

import json

import pytest

from ddtree.bench.grade.problem import graded
from ddtree.bench.workload import read_workload
from ddtree.errors import UserError

datasets = pytest.importorskip("datasets", reason="hub workloads are not tested: pip install 'ddtree[hub]'")

ROWS = {
    "openai/gsm8k": ("main", "test", {"question": "What is 1 + 2?", "answer": "1 + 2 = 3\n#### 3"}),
    "HuggingFaceH4/MATH-500": (
        None,
        "test",
        {"problem": "What is $x$?", "solution": "It is.", "answer": "\\frac{\\pi}{2}", "unique_id": "test/1.json"},
    ),
    "openai/openai_humaneval": (
        "openai_humaneval",
        "test",
        {
            "task_id": "HumanEval/0",
            "prompt": "def one():\n",
            "canonical_solution": "    return 1\n",
            "test": "def check(candidate):\n    assert candidate() == 1\n",
            "entry_point": "one",
        },
    ),
    "google-research-datasets/mbpp": (
        "sanitized",
        "test",
        {
            "source_file": "a.ipynb",
            "task_id": 2,
            "prompt": "Write a function that returns 1.",
            "code": "def one():\n    return 1",
            "test_imports": [],
            "test_list": ["assert one() == 1"],
        },
    ),
    "HuggingFaceH4/mt_bench_prompts": (
        None,
        "train",
        {"prompt": ["First?", "And then?"], "reference": [], "category": "writing", "prompt_id": 7},
    ),
}
TURNS = {
    "gsm8k": ["What is 1 + 2?\nPlease reason step by step, and put your final answer within \\boxed{}."],
    "math500": ["What is $x$?\nPlease reason step by step, and put your final answer within \\boxed{}."],
    "humaneval": ["Complete this Python function and give all of it:\n```python\ndef one():\n\n```"],
    "mbpp": ["Write a function that returns 1."],
    "mt-bench": ["First?", "And then?"],
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Two rows of each set, and of a second configuration or split that must not be taken."""
    for name, (config, split, row) in ROWS.items():
        folder = tmp_path / name
        inside = folder / (config or "data")
        inside.mkdir(parents=True)
        files = [{"split": split, "path": f"{inside.name}/{split}-*"}]
        (inside / f"{split}-00000-of-00001.jsonl").write_text((json.dumps(row) + "\n") * 2)
        configs = [{"config_name": config or "default", "data_files": files}]
        if config in ("main", "sanitized"):
            (folder / "other").mkdir()
            (folder / "other" / "test-00000-of-00001.jsonl").write_text(json.dumps({"wrong": "set"}) + "\n")
            configs.append({"config_name": "other", "data_files": [{"split": "test", "path": "other/test-*"}]})
        (folder / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", TURNS)
def test_names_configurations_splits_and_columns(hub, name):
    workload = read_workload(f"hub:{name}")
    assert workload.name == name and [list(problem.turns) for problem in workload.problems] == [TURNS[name]] * 2
    assert [problem.id for problem in workload.problems] == [f"{name}/0", f"{name}/1"]
    assert "hub " in workload.source and len(read_workload(f"hub:{name}", limit=1).problems) == 1


@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "mbpp"])
def test_they_can_be_graded(hub, name):
    problem = graded(read_workload(f"hub:{name}"))[0][0]
    assert problem.number == "3" if name == "gsm8k" else "one()" in problem.tests or "check(one)" in problem.tests


def test_a_formula_is_no_number_to_grade_by(hub):
    """Of `\\frac{\\pi}{2}` a 2 would be left, and every answer that ends in 2 right."""
    with pytest.raises(UserError, match=r"math500/0: its answer .* is no plain number"):
        graded(read_workload("hub:math500"))


def test_what_cannot_be_had_is_one_line(hub, tmp_path):
    (tmp_path / "openai/gsm8k/main/test-00000-of-00001.jsonl").unlink()
    with pytest.raises(UserError, match="hub:gsm8k could not be loaded") as caught:
        read_workload("hub:gsm8k")
    assert "\n" not in str(caught.value)
