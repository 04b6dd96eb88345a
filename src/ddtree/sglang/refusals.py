"""What DDTREE refuses, each with its reason and what to do instead."""

from __future__ import annotations

from typing import Any

GRAMMAR_NODES = 256
"""Nodes at most beside a grammar: SGLang goes from sibling to sibling by recursion, and Python's has a limit."""

TREE_BACKENDS_MHA = ("fa3", "triton", "flashinfer")
TREE_BACKENDS_MLA = ("fa3", "triton")
CHAIN_ONLY = "knows only chains"


def why_backend_refused(backend: str | None, mla: bool, page_size: int) -> str | None:
    """Why the target's verify pass cannot run on an attention backend, or None where it can."""
    known = TREE_BACKENDS_MLA if mla else TREE_BACKENDS_MHA
    if backend in known:
        return None
    kind = "MLA" if mla else "MHA"
    if backend == "flashinfer":
        reason = "drops the tree's mask in silence for MLA"
    else:
        reason = f"{CHAIN_ONLY} or has not been shown with tree masks"
    return f"attention backend {backend!r} {reason} ({kind}): use --attention-backend {known[0]} or {known[1]}"


SERVER_SWITCHES: tuple[tuple[str, Any, str], ...] = (
    ("enable_dp_attention", False, "DP attention needs idle ranks to verify along: leave out --enable-dp-attention"),
    ("enable_lora", False, "adapters change the target under the drafter: leave out --enable-lora"),
    ("speculative_adaptive", False, "it changes the width, which is fixed at start: leave out --speculative-adaptive"),
    ("enable_two_batch_overlap", False, "it splits a verify batch: leave out --enable-two-batch-overlap"),
    ("enable_single_batch_overlap", False, "not shown to work: leave out --enable-single-batch-overlap"),
    ("enable_pdmux", False, "not shown to work: leave out --enable-pdmux"),
    ("enable_linear_replayssm", False, "replayed states know only chains: leave out --enable-linear-replayssm"),
    ("enable_hisparse", False, "sparse attention knows only chains: leave out --enable-hisparse"),
    ("enable_unified_memory", False, "slots move under the tree: leave out --enable-unified-memory"),
    ("enable_custom_logit_processor", False, "not shown exact per node: leave out --enable-custom-logit-processor"),
    ("enable_deterministic_inference", False, "its seeds are not ours: leave out --enable-deterministic-inference"),
    ("speculative_use_rejection_sampling", False, "biased over a tree: leave out --speculative-use-rejection-sampling"),
    ("speculative_use_block_verification", False, "for chains only: leave out --speculative-use-block-verification"),
    ("speculative_draft_sink_size", 0, "not for DFlash's drafters: leave out --speculative-draft-sink-size"),
    ("speculative_token_map", None, "not for DFlash's drafters: leave out --speculative-token-map"),
    ("speculative_accept_threshold_single", 1.0, "below 1.0 the text is no longer the target's: leave it at 1.0"),
    ("speculative_accept_threshold_acc", 1.0, "below 1.0 the text is no longer the target's: leave it at 1.0"),
    ("disaggregation_mode", "null", "prefill and decode must be one server: leave out --disaggregation-mode"),
    ("pp_size", 1, "pipeline stages would wait for the walk: use tensor or expert parallelism"),
    ("attn_cp_size", 1, "not shown to work: leave out --attn-cp-size"),
    ("dcp_size", 1, "not shown to work: leave out --dcp-size"),
)
"""Field of SGLang's ServerArgs, the only value that works, and why."""


def why_refused(view: Any) -> str | None:
    """The first reason why a server with these arguments cannot run DDTREE, or None.

    Args:
        view: SGLang's ServerArgs, or its view of them during resolution.
    """
    device = getattr(view, "device", None)
    if not str(device).startswith("cuda"):
        return f"the device is {device}: DDTREE runs on NVIDIA GPUs"
    for field, only, reason in SERVER_SWITCHES:
        value = getattr(view, field, only)
        if value is not None and value != only:
            return f"{field} is {value!r}, {reason}"
    if getattr(view, "lora_paths", None):
        return "lora_paths is set, adapters change the target under the drafter: leave out --lora-paths"
    if str(getattr(view, "mamba_radix_cache_strategy", "")).startswith("extra_buffer"):
        return "mamba_radix_cache_strategy holds extra buffers, which know only chains: leave it at its default"
    if getattr(view, "speculative_draft_model_path", None) is None:
        return "no drafter is given: set --speculative-draft-model-path"
    return None


GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


def why_request_refused(request: Any, budget: int) -> str | None:
    """Why what a request asks for cannot be kept exactly by DDTREE on this SGLang, or None.

    Args:
        request: SGLang's.
        budget: nodes of this server's trees.
    """
    sampling_params = request.sampling_params
    for name in ("return_logprob", "return_sampling_mask"):
        if getattr(request, name, False):
            return f"DDTREE does not support {name}: leave it out, or serve without speculation"
    told = {
        "frequency_penalty": sampling_params.frequency_penalty != 0.0,
        "presence_penalty": sampling_params.presence_penalty != 0.0,
        "repetition_penalty": sampling_params.repetition_penalty != 1.0,
        "min_new_tokens": sampling_params.min_new_tokens > 0,
    }
    grammars = [name for name in GRAMMARS if getattr(sampling_params, name, None) is not None]
    if grammars and budget > GRAMMAR_NODES:
        return (
            f"DDTREE does not support grammars ({', '.join(grammars)}) at a budget of {budget}: SGLang walks them down "
            f"a tree by recursion; start with --speculative-ddtree-budget {GRAMMAR_NODES} or less"
        )
    if asked := [name for name, wanted in told.items() if wanted]:
        return (
            f"DDTREE does not support {', '.join(asked)}: SGLang counts such tokens once a step, not along each path "
            "of a tree; leave it out, or serve without speculation"
        )
    return None
