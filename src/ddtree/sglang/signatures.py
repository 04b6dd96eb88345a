"""Which names and parameters of SGLang the plugin stands on, compared with an SGLang's source without importing it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ABSENT = "absent"

Needs = Mapping[str, tuple[str, ...]]
"""File below ``sglang/srt`` and name there, and the parameters that must exist by these names."""

COMMON: Needs = {
    "plugins/hook_registry.py:HookRegistry.register": ("target", "hook", "hook_type"),
    "speculative/spec_info.py:SpeculativeAlgorithm.register": ("name", "supports_overlap", "spec_class"),
    "speculative/spec_info.py:SpeculativeAlgorithm.from_string": ("name",),
    "speculative/spec_info.py:create_dummy_verify_input": (
        "spec_algorithm", "custom_mask", "num_tokens_per_req", "is_draft_worker",
    ),
    "speculative/spec_registry.py:get_spec": ("name",),
    "speculative/spec_registry.py:CustomSpecAlgo.__init__": ("name", "factory", "supports_overlap"),
    "speculative/spec_registry.py:CustomSpecAlgo.handle_server_args": ("server_args",),
    "speculative/spec_registry.py:CustomSpecAlgo.get_num_tokens_per_req_for_target_verify": (
        "num_draft_tokens", "is_draft_worker",
    ),
    "speculative/dflash_worker_v2.py:DFlashWorkerV2.__init__": ("server_args", "gpu_id", "nccl_port", "target_worker"),
    "speculative/dflash_worker_v2.py:DFlashWorkerV2.forward_batch_generation": ("batch", "on_publish"),
    "speculative/dflash_worker_v2.py:DFlashWorkerV2._maybe_build_draft_sampler": (),
    "speculative/dflash_worker_v2.py:DFlashWorkerV2._compute_compact_draft_seq_lens": ("seq_lens",),
    "speculative/dflash_worker_v2.py:DFlashWorkerV2._fill_compact_seq_lens_cpu_bound": ("batch_seq_lens_cpu", "out"),
    "speculative/dflash_worker_v2.py:DFlashWorkerV2._rebuild_compact_draft_cache": (
        "req_pool_indices", "prefix_lens", "draft_prefix_lens", "verify_out_cache_loc_2d", "bs", "block_size",
    ),
    "speculative/dflash_worker_v2.py:DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc": (
        "target_hidden", "cache_loc", "positions", "cache_loc_2d", "commit_lens",
    ),
    "speculative/dflash_worker_v2.py:DFlashWorkerV2._make_next_draft_input_prefill": ("bonus_tokens", "seq_lens"),
    "speculative/dflash_worker_v2.py:DFlashWorkerV2._make_next_draft_input_decode": ("bonus_tokens", "new_seq_lens"),
    "speculative/dflash_info.py:DFlashVerifyInput.prepare_for_verify": ("batch", "target_worker"),
    "speculative/dflash_info_v2.py:DFlashDraftInputV2.prepare_for_decode": ("batch",),
    "speculative/dflash_utils.py:validate_dflash_request": ("req",),
    "speculative/dflash_utils.py:parse_dflash_draft_config": ("draft_hf_config",),
    "managers/overlap_utils.py:FutureMap.__init__": ("device", "spec_algo", "req_to_token_pool"),
    "mem_cache/allocation.py:alloc_for_spec_decode": (
        "tree_cache", "req_to_token_pool", "reqs", "req_pool_indices", "cur_kv_lens", "cur_kv_lens_cpu", "nxt_kv_lens",
        "nxt_kv_lens_cpu", "num_needed_tokens", "batch",
    ),
    "model_executor/runner/decode_cuda_graph_runner.py:DecodeCudaGraphRunner.get_spec_info": ("num_tokens",),
    "server_args.py:ServerArgs.add_cli_args": ("parser",),
    "server_args.py:ServerArgs.from_cli_args": ("args",),
    "arg_groups/speculative_hook.py:_resolve_dflash_draft_attention_backend": ("server_args",),
    "runtime_context.py:get_server_args": (),
}  # fmt: skip

RANKS_GIVEN: Needs = {
    "speculative/dflash_worker_v2.py:DFlashWorkerV2.__init__": ("ps",),
    "speculative/dflash_worker_v2.py:DFlashWorkerV2._fill_compact_seq_lens_cpu_bound": (
        "reserved_seq_lens_cpu", "draft_prefix_lens",
    ),
}  # fmt: skip

CONFIGURATION: Needs = {
    "runtime_context.py:get_spec": (),
    "runtime_context.py:_ConfigBag.override": (),
    "speculative/spec_utils.py:GrammarTree.from_device": (
        "retrieve_next_token", "retrieve_next_sibling", "draft_token",
    ),
    "speculative/spec_utils.py:build_grammar_vocab_mask": ("reqs", "tree", "sampling_info", "device", "barrier"),
    "speculative/dflash_worker_v2.py:DFlashWorkerV2.forward_batch_generation": ("grammar_barrier",),
}  # fmt: skip

SLOT_PLANS: Needs = {
    "speculative/dflash_worker_v2.py:DFlashWorkerV2._fill_compact_seq_lens_cpu_bound": ("nxt_kv_lens_cpu",),
    "speculative/dflash_worker_v2.py:DFlashWorkerV2._defer_target_verify_gather": (),
    "speculative/dflash_worker_v2.py:DFlashWorkerV2.prewarm_sampling": (),
    "mem_cache/kv_index_translator.py:KVIndexTranslator.own_plan": ("forward_batch",),
    "mem_cache/kv_loc_plan.py:KVLocPlan.bind": ("batch", "reader"),
    "speculative/spec_utils.py:draft_tp_context": (),
    "arg_groups/model_override_base.py:model_config_of": ("server_args",),
    "managers/scheduler_components/internal_state.py:SchedulerInternalStateController._add_speculative": ("state",),
}  # fmt: skip

RELEASES: Mapping[str, tuple[Needs, ...]] = {
    "0.5.16": (COMMON, RANKS_GIVEN),
    "0.5.17": (COMMON, RANKS_GIVEN, CONFIGURATION),
    "0.5.23": (COMMON, CONFIGURATION, SLOT_PLANS),
}
"""The shapes of SGLang that the plugin fits, each named for the first release that was seen to have it."""


def release_of(srt: Path) -> tuple[str | None, list[str]]:
    """Which of `RELEASES` an SGLang is like: the last that it fits, else None and how it differs from the nearest.

    Args:
        srt: the folder ``sglang/srt``.
    """
    lacks = {name: differences(srt, needs) for name, needs in RELEASES.items()}
    for name in reversed(lacks):
        if not lacks[name]:
            return name, []
    return None, min(reversed(lacks.values()), key=len)


def differences(srt: Path, needs: tuple[Needs, ...]) -> list[str]:
    """What an SGLang lacks of ``needs``, in words; empty where everything is there."""
    found: list[str] = []
    trees: dict[str, ast.Module | None] = {}
    for place, parameters in (item for part in needs for item in part.items()):
        file, name = place.split(":")
        if file not in trees:
            path = srt / file
            trees[file] = ast.parse(path.read_bytes()) if path.is_file() else None
        tree = trees[file]
        if tree is None:
            found.append(f"{file} is {ABSENT}")
            continue
        names = parameters_of(tree, name)
        if names is None:
            found.append(f"{name} of {file} is {ABSENT}")
        elif missing := [parameter for parameter in parameters if parameter not in names]:
            found.append(f"{name} of {file} has no parameter {', '.join(missing)}")
    return list(dict.fromkeys(found))


def parameters_of(tree: ast.Module, name: str) -> tuple[str, ...] | None:
    """Parameters of a function, or of ``Class.method``, ``self`` left out; None where there is none of that name."""
    body: list[ast.stmt] = tree.body
    *classes, function = name.split(".")
    for class_name in classes:
        inner = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name), None)
        if inner is None:
            return None
        body = inner.body
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            arguments = node.args
            names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            return tuple(n for n in names if n not in ("self", "cls"))
    return None


def check_installed() -> tuple[str, str | None, list[str]]:
    """Version of the SGLang in this environment, the release that it is like, and how it differs if it is like none."""
    spec = find_spec("sglang")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        installed = "of unknown version"
    if not places:
        return installed, None, ["the package sglang is absent"]
    return installed, *release_of(Path(places[0]) / "srt")
