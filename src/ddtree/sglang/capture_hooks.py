"""Two hooks on SGLang that let a verify pass of the DFLASH family carry a tree's mask.

SGLang captures verify graphs of that family without a mask, for chains. Here the pass that is captured (and the dummy
pass before it) is given SGLang's own mask buffer, for our algorithm and the target only. All else passes through.
"""

from __future__ import annotations

from typing import Any

CAPTURE = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info"
DUMMY = "sglang.srt.speculative.spec_info.create_dummy_verify_input"
REQUEST = "sglang.srt.speculative.dflash_utils.validate_dflash_request"


def is_ours(algorithm: Any) -> bool:
    """Whether an SGLang speculative algorithm is the one that this plugin registered."""
    return bool(getattr(algorithm, "is_ddtree_plugin", False))


def _is_tree(server_args: Any) -> bool:
    """False for chains, which keep SGLang's causal pass."""
    return (server_args.speculative_eagle_topk or 0) > 1


def mask_in_capture(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
    """After ``DecodeCudaGraphRunner.get_spec_info``."""
    model_runner = runner.model_runner
    ours = is_ours(model_runner.spec_algorithm) and not model_runner.is_draft_worker
    if result is not None and ours and _is_tree(model_runner.server_args):
        result.custom_mask = runner.buffers.custom_mask
    return result


def mask_in_dummy(
    result: Any,
    spec_algorithm: Any,
    server_args: Any = None,
    custom_mask: Any = None,
    num_tokens_per_req: int = 0,
    is_draft_worker: bool = False,
) -> Any:
    """After ``create_dummy_verify_input``."""
    if result is not None and is_ours(spec_algorithm) and not is_draft_worker and _is_tree(server_args):
        result.custom_mask = custom_mask
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
    return why_request_refused(request.sampling_params)
