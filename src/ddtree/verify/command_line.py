"""Settings that stand on an engine's command line; for what it does not tell over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any


def _speculative_config(text: str) -> dict[str, Any]:
    """vLLM's JSON: method, model, num_speculative_tokens."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(told, dict):
        return {}
    found: dict[str, Any] = {}
    if "method" in told:
        found["algorithm"] = str(told["method"]).lower()
    if "num_speculative_tokens" in told:
        found["budget"] = told["num_speculative_tokens"]
        if found.get("algorithm") == "dflash":
            found["block_size"] = int(told["num_speculative_tokens"]) + 1
    if "model" in told:
        found["drafter"] = told["model"]
    if "revision" in told:
        found["drafter_revision"] = told["revision"]
    return found


def _one(name: str, kind: Callable[[str], Any] = str) -> Callable[[str], dict[str, Any]]:
    return lambda text: {name: kind(text)}


_FLAGS: dict[str, Callable[[str], dict[str, Any]]] = {
    "--speculative-config": _speculative_config,
    "--speculative_config": _speculative_config,
    "--model": _one("model"),
    "--model-path": _one("model"),
    "--draft": _one("drafter"),
    "--speculative-draft-model-path": _one("drafter"),
    "--speculative-algorithm": _one("algorithm", str.lower),
    "--speculative-ddtree-budget": _one("budget", int),
    "--speculative-ddtree-topk-cap": _one("top_k_cap", int),
    "--speculative-ddtree-draft-temperature": _one("draft_temperature", float),
    "--speculative-dflash-block-size": _one("block_size", int),
    "--speculative-draft-window-size": _one("draft_window", int),
    "--speculative-dflash-draft-window-size": _one("draft_window", int),
    "--max-model-len": _one("context_length", int),
    "--context-length": _one("context_length", int),
    "--max-num-seqs": _one("max_running_requests", int),
    "--max-running-requests": _one("max_running_requests", int),
    "--attention-backend": _one("attention_backend"),
    "--gpu-memory-utilization": _one("memory_fraction", float),
    "--mem-fraction-static": _one("memory_fraction", float),
    "--tensor-parallel-size": _one("tp", int),
    "--tp-size": _one("tp", int),
    "--tp": _one("tp", int),
    "--ep-size": _one("ep", int),
    "--pipeline-parallel-size": _one("pp", int),
    "--pp-size": _one("pp", int),
    "--data-parallel-size": _one("dp", int),
    "--dp-size": _one("dp", int),
    "--dtype": _one("dtype"),
    "--device": _one("device"),
    "--threads": _one("threads", int),
    "--revision": _one("model_revision"),
    "--speculative-draft-model-revision": _one("drafter_revision"),
    "--memory-fraction": _one("memory_fraction", float),
}
_SWITCHES: dict[str, dict[str, Any]] = {
    "--disable-cuda-graph": {"cuda_graphs": False},
    "--enforce-eager": {"cuda_graphs": False},
    "--enable-nccl-nvls": {"nvls": True},
}


def settings_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Settings by the names of `ddtree.verify.effective.SETTINGS`; the last of a flag that stands twice counts."""
    found: dict[str, Any] = {}
    for place, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag in _SWITCHES and not equals:
            found |= _SWITCHES[flag]
        elif read := _FLAGS.get(flag):
            given = value if equals else arguments[place + 1] if place + 1 < len(arguments) else ""
            try:
                found |= read(given)
            except ValueError:
                continue
    return found
