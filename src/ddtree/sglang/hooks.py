"""Hooks on SGLang: two let a verify pass of the DFLASH family carry a tree's mask, the others speak for the plugin.

SGLang captures verify graphs of that family without a mask, for chains. Here the pass that is captured (and the dummy
pass before it) is given SGLang's own mask buffer, for our algorithm and the target only. All else passes through.
"""

from __future__ import annotations

from typing import Any

from ddtree.sglang.settings import TreeSettings

CAPTURE = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info"
DUMMY = "sglang.srt.speculative.spec_info.create_dummy_verify_input"
REQUEST = "sglang.srt.speculative.dflash_utils.validate_dflash_request"
STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative"
"""Since 0.5.23; before, `/server_info` tells of all attributes of SGLang's arguments."""


def is_ours(algorithm: Any) -> bool:
    """Whether an SGLang speculative algorithm is the one that this plugin registered."""
    return bool(getattr(algorithm, "is_ddtree_plugin", False))


def _is_tree() -> bool:
    """False for chains, which keep SGLang's causal pass."""
    return not TreeSettings.from_environment().is_chain


def mask_in_capture(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
    """After ``DecodeCudaGraphRunner.get_spec_info``."""
    model_runner = runner.model_runner
    ours = is_ours(model_runner.spec_algorithm) and not model_runner.is_draft_worker
    if result is not None and ours and _is_tree():
        result.custom_mask = runner.buffers.custom_mask
    return result


def mask_in_dummy(result: Any, spec_algorithm: Any, *rest: Any, **named: Any) -> Any:
    """After ``create_dummy_verify_input``, whose last three arguments are the same in all releases."""
    if result is not None and is_ours(spec_algorithm):
        given = dict(zip(("custom_mask", "num_tokens_per_req", "is_draft_worker"), rest[-3:], strict=False)) | named
        if not given["is_draft_worker"] and _is_tree():
            result.custom_mask = given["custom_mask"]
    return result


def refuse_request(result: Any, request: Any, *_: Any, **__: Any) -> Any:
    """After ``validate_dflash_request``: say DDTREE where SGLang says DFLASH, and refuse what cannot be exact."""
    from sglang.srt.runtime_context import get_server_args
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from ddtree.sglang.refusals import why_request_refused

    if not is_ours(SpeculativeAlgorithm.from_string(get_server_args().speculative_algorithm)):
        return result
    if result is not None:
        return result.replace("DFLASH", "DDTREE")
    return why_request_refused(request, TreeSettings.from_environment().budget)


def tell_shape(result: Any, controller: Any, state: dict[str, Any], *_: Any, **__: Any) -> Any:
    """After ``SchedulerInternalStateController._add_speculative``: what ``/server_info`` says of the trees."""
    if is_ours(controller.scheduler.spec_algorithm):
        state.update(TreeSettings.from_environment().told())
    return result
