"""The command line that serves a deployment: every flag from the table in :mod:`ddtree.deploy.flags`."""

from __future__ import annotations

import json
import sys

from ddtree.deploy.deployment import Deployment
from ddtree.deploy.flags import FLAGS
from ddtree.deploy.sections import Weights
from ddtree.errors import UserError

MODES = {"ddtree": "tree", "dflash": "chain", "none": "ar"}
"""Of the native engine, by speculation.algorithm."""


def render_command(deployment: Deployment, key_file: str) -> tuple[str, ...]:
    """The command, one argument each, as the service's process will have it.

    Args:
        key_file: where the host keeps what is rendered for secrets.api_key.
    """
    kind = deployment.engine.kind
    write = {"native": _native, "sglang": _sglang, "vllm": _vllm}[kind]
    return (*_program(deployment), *write(deployment, key_file), *deployment.runtime.extra_args)


class _Flags:
    """Arguments that grow; a flag that the table does not know is a fault of ours."""

    def __init__(self, deployment: Deployment) -> None:
        self._known = FLAGS[deployment.engine.kind]
        self.arguments: list[str] = []

    def add(self, flag: str, *values: object) -> None:
        assert flag in self._known, flag
        self.arguments += [flag, *map(str, values)]

    def add_if(self, flag: str, value: object) -> None:
        """Left out where ``value`` says nothing: None, empty or False; True gives the flag alone."""
        if value is True:
            self.add(flag)
        elif value not in (None, "", False):
            self.add(flag, value)


def _program(deployment: Deployment) -> tuple[str, ...]:
    engine = deployment.engine
    if engine.kind == "sglang":
        return (engine.executable or f"{engine.venv}/bin/python", "-m", "sglang.launch_server")
    if engine.executable or engine.venv:
        name = "ddtree" if engine.kind == "native" else "vllm"
        return (engine.executable or f"{engine.venv}/bin/{name}", "serve")
    return (sys.executable, "-m", "ddtree", "serve")


def _place(weights: Weights) -> str:
    return weights.path or weights.hub or ""


def _revision(weights: Weights | None) -> str | None:
    """The revision, where the engine fetches the weights itself."""
    return weights.revision if weights and not weights.path else None


def _native(deployment: Deployment, key_file: str) -> list[str]:
    speculation, runtime, service = deployment.speculation, deployment.runtime, deployment.service
    flags = _Flags(deployment)
    if not deployment.model.demo:
        flags.add("--model", _place(deployment.model))
    flags.add_if("--served-model-name", deployment.served_name)
    if deployment.drafter:
        flags.add("--draft", _place(deployment.drafter))
    flags.add("--mode", MODES[speculation.algorithm])
    flags.add_if("--budget", speculation.budget)
    flags.add_if("--top-k-cap", speculation.topk_cap)
    flags.add_if("--block-size", speculation.block_size)
    flags.add_if("--draft-window", speculation.draft_window)
    flags.add_if("--draft-temperature", speculation.draft_temperature)
    flags.add("--device", runtime.device)
    if runtime.dtype != "auto":
        flags.add("--dtype", runtime.dtype)
    flags.add_if("--memory-fraction", runtime.memory_fraction)
    flags.add_if("--max-batch", runtime.max_running_requests)
    flags.add_if("--max-model-len", runtime.context_length)
    flags.add_if("--threads", runtime.threads)
    flags.add_if("--exact", runtime.exact)
    flags.add("--host", service.address)
    flags.add("--port", service.port)
    flags.add_if("--allow-unauthenticated", service.allow_unauthenticated)
    if deployment.secrets.api_key:
        flags.add("--api-key-file", key_file)
    return flags.arguments


def _sglang(deployment: Deployment, key_file: str) -> list[str]:
    speculation, parallelism, runtime = deployment.speculation, deployment.parallelism, deployment.runtime
    flags = _Flags(deployment)
    flags.add("--model-path", _place(deployment.model))
    flags.add_if("--revision", _revision(deployment.model))
    flags.add_if("--served-model-name", deployment.served_name)
    flags.add_if("--trust-remote-code", deployment.model.trust_remote_code)

    flags.add("--tp-size", parallelism.tp)
    if parallelism.ep > 1:
        flags.add("--ep-size", parallelism.ep)
        if parallelism.ep < parallelism.tp:  # sglang wants ep * moe_dp = tp
            flags.add("--moe-dp-size", parallelism.tp // parallelism.ep)
    if parallelism.pp > 1:
        flags.add("--pp-size", parallelism.pp)
    if parallelism.dp > 1:
        flags.add("--dp-size", parallelism.dp)
    flags.add_if("--enable-dp-attention", parallelism.dp_attention)
    if parallelism.nodes > 1:
        flags.add("--nnodes", parallelism.nodes)
        flags.add("--node-rank", parallelism.node_rank)
        flags.add("--dist-init-addr", parallelism.init_address)

    if deployment.drafter:
        flags.add("--speculative-algorithm", speculation.algorithm.upper())
        flags.add("--speculative-draft-model-path", _place(deployment.drafter))
        flags.add_if("--speculative-draft-model-revision", _revision(deployment.drafter))
        flags.add_if("--speculative-ddtree-budget", speculation.budget)
        flags.add_if("--speculative-ddtree-topk-cap", speculation.topk_cap)
        flags.add_if("--speculative-ddtree-draft-temperature", speculation.draft_temperature)
        flags.add_if("--speculative-dflash-block-size", speculation.block_size)
        flags.add_if("--speculative-draft-window-size", speculation.draft_window)

    flags.add("--device", runtime.device)
    if runtime.dtype != "auto":
        flags.add("--dtype", runtime.dtype)
    flags.add_if("--attention-backend", runtime.attention_backend)
    flags.add_if("--mem-fraction-static", runtime.memory_fraction)
    flags.add_if("--max-running-requests", runtime.max_running_requests)
    flags.add_if("--context-length", runtime.context_length)
    if runtime.cuda_graphs is False:
        flags.add("--cuda-graph-backend-decode", "disabled")
        flags.add("--cuda-graph-backend-prefill", "disabled")
    if runtime.cuda_graph_sizes:
        flags.add("--cuda-graph-bs-decode", *runtime.cuda_graph_sizes)
    flags.add_if("--enable-nccl-nvls", runtime.nvls)
    flags.add("--host", deployment.service.address)
    flags.add("--port", deployment.service.port)
    flags.add("--enable-metrics")
    if deployment.secrets.api_key:
        flags.add("--config", key_file)
    return flags.arguments


def _vllm(deployment: Deployment, key_file: str) -> list[str]:
    speculation, parallelism, runtime = deployment.speculation, deployment.parallelism, deployment.runtime
    flags = _Flags(deployment)
    flags.add_if("--revision", _revision(deployment.model))
    flags.add_if("--served-model-name", deployment.served_name)
    flags.add_if("--trust-remote-code", deployment.model.trust_remote_code)

    flags.add("--tensor-parallel-size", parallelism.tp)
    flags.add_if("--enable-expert-parallel", parallelism.ep > 1)
    if parallelism.pp > 1:
        flags.add("--pipeline-parallel-size", parallelism.pp)
    if parallelism.dp > 1:
        flags.add("--data-parallel-size", parallelism.dp)
    if parallelism.nodes > 1:
        address, _, port = (parallelism.init_address or "").rpartition(":")
        flags.add("--nnodes", parallelism.nodes)
        flags.add("--node-rank", parallelism.node_rank)
        flags.add("--master-addr", address)
        flags.add("--master-port", port)

    if deployment.drafter:
        assert speculation.block_size is not None
        drafting: dict[str, str | int] = {
            "method": speculation.algorithm,
            "model": _place(deployment.drafter),
            "num_speculative_tokens": speculation.block_size - 1,  # the root is none of them
        }
        if revision := _revision(deployment.drafter):
            drafting["revision"] = revision
        flags.add("--speculative-config", json.dumps(drafting))

    if runtime.dtype != "auto":
        flags.add("--dtype", runtime.dtype)
    flags.add_if("--attention-backend", runtime.attention_backend and runtime.attention_backend.upper())
    flags.add_if("--gpu-memory-utilization", runtime.memory_fraction)
    flags.add_if("--max-num-seqs", runtime.max_running_requests)
    flags.add_if("--max-model-len", runtime.context_length)
    flags.add_if("--enforce-eager", runtime.cuda_graphs is False)
    if runtime.cuda_graph_sizes:
        flags.add("--cudagraph-capture-sizes", *runtime.cuda_graph_sizes)
    flags.add("--host", deployment.service.address)
    flags.add("--port", deployment.service.port)
    return [_place(deployment.model), *flags.arguments]


def require_program(deployment: Deployment) -> None:
    """Refuse a deployment whose engine is nowhere.

    Raises:
        UserError: engine.venv is missing, and this machine's own ddtree is not what will serve.
    """
    engine = deployment.engine
    if engine.venv or engine.executable:
        return
    if engine.kind != "native" or deployment.host.kind == "ssh":
        raise UserError(
            f"engine.venv is missing for the {engine.kind} engine on {deployment.host.address or 'this machine'}",
            "add engine.venv = the virtual environment that holds it there",
        )
