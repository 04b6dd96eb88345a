"""Argument resolution by the released SGLang itself, under a made-up GPU, with the plugin found by its entry point."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ddtree.demo import drafter_folder
from ddtree.sglang.refusals import why_backend_refused
from ddtree.verify.engines.sglang import SglangAdapter
from sglang_sources import sglang_source, support_packages

ROOT = Path(__file__).parents[2]
TREE = ["--speculative-algorithm", "DDTREE"]
FA3 = ["--attention-backend", "fa3"]

SWITCHES = {"fold_tail": True, "own_tables": True, "check_ranks": False, "count_experts": False}

SHAPES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "budget 16": (
        [*TREE, *FA3, "--speculative-ddtree-budget", "16"],
        {"speculative_num_draft_tokens": 17, "speculative_eagle_topk": 2, "speculative_num_steps": 1,
         "speculative_dflash_block_size": 16, "attention_backend": "fa3", "max_running_requests": 48,
         "speculative_draft_attention_backend": "fa3",
         "resolved": {"budget": 16, "topk_cap": 16, "block_size": 16, "draft_temperature": 0.8, **SWITCHES}},
    ),
    "default budget, cap 4": (
        [*TREE, *FA3, "--speculative-ddtree-topk-cap", "4"],
        {"speculative_num_draft_tokens": 33,
         "resolved": {"budget": 32, "topk_cap": 4, "block_size": 16, "draft_temperature": 0.8, **SWITCHES}},
    ),
    "another draft temperature than the drafter's own": (
        [*TREE, *FA3, "--speculative-ddtree-budget", "8", "--speculative-ddtree-draft-temperature", "1"],
        {"resolved": {"budget": 8, "topk_cap": 8, "block_size": 16, "draft_temperature": 1.0, **SWITCHES}},
    ),
    "a chain is DFLASH's shape": (
        [*TREE, *FA3, "--speculative-ddtree-topk-cap", "1"],
        {"speculative_num_draft_tokens": 16, "speculative_eagle_topk": 1, "speculative_num_steps": 1,
         "resolved": {"budget": 15, "topk_cap": 1, "block_size": 16, "draft_temperature": 1.0, **SWITCHES}},
    ),
    "a short chain": (
        [*TREE, *FA3, "--speculative-ddtree-topk-cap", "1", "--speculative-ddtree-budget", "7"],
        # Rows of 16 and a path of 8 must be held ahead: 24 slots, of which SGLang counts 2 * max(steps, 8).
        {"speculative_num_draft_tokens": 8, "speculative_eagle_topk": 1, "speculative_num_steps": 12},
    ),
    "SGLang's own flag": ([*TREE, *FA3, "--speculative-num-draft-tokens", "9"], {"speculative_num_draft_tokens": 9}),
    "a tree narrower than its block": (
        [*TREE, *FA3, "--speculative-ddtree-budget", "4"],
        # Rows of 16 and a path of 5 must be held ahead: 21 slots, of which SGLang counts 2 * max(steps * 2, 5).
        {"speculative_num_draft_tokens": 5, "speculative_num_steps": 6},
    ),
    "block size 8": (
        [*TREE, *FA3, "--speculative-ddtree-budget", "8", "--speculative-dflash-block-size", "8"],
        {"speculative_num_draft_tokens": 9, "speculative_dflash_block_size": 8, "speculative_num_steps": 1},
    ),
    "triton": ([*TREE, "--attention-backend", "triton"], {"attention_backend": "triton"}),
    "budget 0 is plain decoding": (
        [*TREE, *FA3, "--speculative-ddtree-budget", "0"],
        {"speculative_algorithm": None, "speculative_num_draft_tokens": None, "speculative_draft_model_path": None},
    ),
    "mixed chunks are turned off": ([*TREE, *FA3, "--enable-mixed-chunk"], {"enable_mixed_chunk": False}),
}  # fmt: skip

REFUSED: dict[str, tuple[list[str], str]] = {
    "two budgets": (
        [*TREE, *FA3, "--speculative-ddtree-budget", "8", "--speculative-num-draft-tokens", "17"],
        "--speculative-ddtree-budget says 8",
    ),
    "budget too large": ([*TREE, *FA3, "--speculative-ddtree-budget", "2000"], "from 0 to 1024"),
    "a chain longer than its block": (
        [*TREE, *FA3, "--speculative-ddtree-topk-cap", "1", "--speculative-ddtree-budget", "16"], "at most 15 nodes",
    ),
    "auto without measurements": (
        [*TREE, *FA3, "--speculative-ddtree-budget", "auto"], "only a start by command line can take them",
    ),
    "a budget in words": ([*TREE, *FA3, "--speculative-ddtree-budget", "many"], "SystemExit: 2"),
    "no concurrency": (
        [*TREE, *FA3, "--speculative-ddtree-budget", "auto", "--speculative-ddtree-concurrency", "0"], "from 1 to 4096",
    ),
    "no candidates": ([*TREE, *FA3, "--speculative-ddtree-topk-cap", "0"], "from 1 to 128"),
    "a draft temperature out of range": (
        [*TREE, *FA3, "--speculative-ddtree-draft-temperature", "0.05"], "give a number from 0.1 to 10",
    ),
    "no number for a draft temperature": (
        [*TREE, *FA3, "--speculative-ddtree-draft-temperature", "nan"], "give a number from 0.1 to 10",
    ),
    "a chain with a draft temperature": (
        [*TREE, *FA3, "--speculative-ddtree-topk-cap", "1", "--speculative-ddtree-draft-temperature", "0.8"],
        "means nothing to a chain",
    ),
    "one node with a draft temperature": (
        [*TREE, *FA3, "--speculative-ddtree-budget", "1", "--speculative-ddtree-draft-temperature", "0.8"],
        "means nothing to a chain",
    ),
    "EAGLE's cap": ([*TREE, *FA3, "--speculative-eagle-topk", "4"], "--speculative-ddtree-topk-cap"),
    "chain-only backend": ([*TREE, "--attention-backend", "torch_native"], "use --attention-backend fa3 or triton"),
    "chain-only decode backend": (
        [*TREE, *FA3, "--decode-attention-backend", "flex_attention"], "use --attention-backend fa3 or triton",
    ),
    "pipeline": ([*TREE, *FA3, "--pp-size", "2"], "pipeline stages"),
    "custom processors": ([*TREE, *FA3, "--enable-custom-logit-processor"], "not shown exact per node"),
    "threshold": ([*TREE, *FA3, "--speculative-accept-threshold-single", "0.9"], "leave it at 1.0"),
    "other threshold": ([*TREE, *FA3, "--speculative-accept-threshold-acc", "0.9"], "leave it at 1.0"),
    "rejection sampling": ([*TREE, *FA3, "--speculative-use-rejection-sampling"], "biased over a tree"),
    "EAGLE's token map": ([*TREE, *FA3, "--speculative-token-map", "map.pt"], "leave out --speculative-token-map"),
    "window below the block": ([*TREE, *FA3, "--speculative-draft-window-size", "8"], "below the block size 16"),
    "our flag without our algorithm": (["--speculative-ddtree-budget", "8"], "needs --speculative-algorithm DDTREE"),
}  # fmt: skip

OTHERS = [[], FA3, ["--speculative-algorithm", "DFLASH", *FA3], ["--speculative-algorithm", "DFLASH"]]


def run(version: str, target: Path, tmp_path: Path) -> dict[str, Any]:
    """All cases in one process of that version."""
    info = tmp_path / "ddtree-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtree\nVersion: 0\n")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    lines = [f"{name} = {place}" for name, place in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *lines, ""]))
    source = sglang_source(version)
    path = [support_packages(), tmp_path, ROOT / "src"]
    common = ["--model-path", str(target), "--random-seed", "1"]
    drafter = ["--speculative-draft-model-path", str(drafter_folder())]
    cases = [flags for flags, _ in (*SHAPES.values(), *REFUSED.values())] + OTHERS
    cases = [[*common, *(drafter if "--speculative-algorithm" in flags else []), *flags] for flags in cases]
    cases.append([*common, *TREE, *FA3])  # no drafter
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "sglang_stand_ins.py"), str(source)],
        input=json.dumps(cases), capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"PYTHONPATH": ":".join(map(str, path)), "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1",
                           "DDTREE_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told | {"version": version}


@pytest.fixture(scope="module", params=["0.5.16", "0.5.17", "0.5.18", "0.5.23"])
def told(request, target_folder, tmp_path_factory):
    return run(request.param, target_folder, tmp_path_factory.mktemp("plugin"))


@pytest.mark.parametrize("case", SHAPES)
def test_arguments_resolve(told, case):
    got = told["answers"][list(SHAPES).index(case)]
    assert "error" not in got, got
    for name, want in SHAPES[case][1].items():
        assert (json.loads(got[name]) if name == "resolved" else got[name]) == want, name


@pytest.mark.parametrize(
    ("case", "shape"),
    [("budget 16", (16, 16)), ("default budget, cap 4", (32, 4)), ("a chain is DFLASH's shape", (15, 1)),
     ("budget 0 is plain decoding", (None, None))],
)  # fmt: skip
def test_verify_reads_budget_and_cap_from_server_info(told, case, shape):
    state = told["answers"][list(SHAPES).index(case)]["internal_state"]
    adapter = SglangAdapter.__new__(SglangAdapter)  # without a connection: the page is given
    adapter._info = lambda: {"version": "0.5.16", "internal_states": [state]}
    settings = adapter.effective().settings
    assert (settings.get("budget"), settings.get("top_k_cap")) == shape


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_its_reason(told, case):
    got = told["answers"][len(SHAPES) + list(REFUSED).index(case)]
    assert REFUSED[case][1] in got.get("error", "resolved"), got.get("error")
    assert "\n" not in got["error"]


def test_a_drafter_must_be_given(told):
    assert "--speculative-draft-model-path" in told["answers"][-1]["error"]


def test_other_servers_are_left_alone(told):
    """Every argument of plain and DFLASH servers is the same with the plugin as without."""
    assert len(told["before"]) == len(OTHERS)
    assert all("error" not in got for got in told["before"]), told["before"]
    assert told["after"] == told["before"]


SLOTS_HELD = {"0.5.16": "reserved_seq_lens", "0.5.17": "reserved_seq_lens", "0.5.18": "reserved_seq_lens"}


def test_the_worker_stands_on_the_released_class(told):
    """It can be imported beside it, and what it puts in its place is there."""
    found = told["worker"]
    in_all = {
        "__init__", "alloc_memory_pool", "init_attention_backends", "init_cuda_graphs", "_maybe_build_draft_sampler",
        "_make_next_draft_input_prefill", "_make_next_draft_input_decode", "forward_batch_generation",
    }  # fmt: skip
    since_0523 = {"prewarm_sampling", "_defer_target_verify_gather"}
    wanted = in_all if told["version"] in SLOTS_HELD else in_all | since_0523
    assert set(found["of_sglang"]) == wanted
    assert found["rows"] == [17, 16]
    assert found["reserved"] == SLOTS_HELD.get(told["version"], "nxt_kv_lens") and all(found["reserved_fields"])
    assert found["read_by_the_worker"] == ["pytorch", 1, 1]
    assert not found["key_fields_missing"], "measurements of other servers would be taken for this one's"


def test_a_verify_pass_has_tables_of_its_own_unless_switched_off_or_without_graphs(told):
    assert told["verify_passes"] == [["own tables"], ["by the mask"], ["by the mask"]]


def test_the_drafter_is_made_with_its_block_and_the_target_with_the_tree(told):
    """Whichever of both SGLang reads: arguments, or the configuration of the process, which is put back."""
    found, version = told["worker"], told["version"]
    target, tree, block = 17, [17, 2], [12, 1]
    own = target if version == "0.5.23" else 12  # which reads nothing of this from its arguments
    configured = {"before": tree, "within": block, "after": tree}
    for when, configuration in configured.items():
        assert found[when]["arguments"] == [target, own], when
        assert found[when]["configuration"] == (None if version == "0.5.16" else configuration), when


@pytest.mark.parametrize(
    ("backend", "mla", "refused"),
    [("fa3", False, False), ("triton", False, False), ("flashinfer", False, False), ("fa3", True, False),
     ("triton", True, False), ("flashinfer", True, True), ("trtllm_mla", True, True), ("flashmla", True, True),
     ("cutlass_mla", True, True), ("dsa", True, True), ("trtllm_mha", False, True), (None, False, True)],
)  # fmt: skip
def test_backends_that_lose_the_mask_are_refused(backend, mla, refused):
    reason = why_backend_refused(backend, mla, page_size=1)
    assert (reason is not None) == refused
    if reason:
        assert "--attention-backend fa3 or triton" in reason


def test_the_head_hears_how_a_batch_samples_before_its_trees_are_built(told):
    """In a graph the pass builds them itself."""
    first = ["temperatures of 3: how they sample", "pass"]
    assert told["draft_passes"] == [[*first, "3 trees read"], [*first, "trees of states", "3 trees read"]]
