"""Combinations of keys that cannot work, each refused by name before anything is touched."""

from __future__ import annotations

import ipaddress
import re

from ddtree.deploy.declaration import Declaration
from ddtree.deploy.flags import is_own_speculation, key_of
from ddtree.deploy.section import refuse
from ddtree.deploy.sections import OF_DRAFTS, OF_TREES

TREE_BACKENDS = ("triton", "fa3", "fa4", "flashinfer")
"""SGLang's attention backends that can verify a tree on ordinary attention."""
TREE_BACKENDS_MLA = ("triton", "fa3")
"""The same on MLA. FlashInfer computes the tree's mask there and drops it; the others know chains only."""
_SECRET_FLAG = re.compile(r"--([\w-]+[-_])?(password|secret|api[-_]key|(hf|auth|access|bearer)[-_]token)(=|$)")
NOT_WITH_TREES = {
    "--enable-lora": "LoRA",
    "--lora-paths": "LoRA",
    "--disaggregation-mode": "prefill-decode disaggregation",
    "--speculative-adaptive": "adaptive speculation",
    "--enable-two-batch-overlap": "two-batch overlap",
    "--enable-mixed-chunk": "mixed chunks",
}


def refuse_combinations(deployment: Declaration) -> None:
    """Raise pydantic's error, by :func:`ddtree.deploy.section.refuse`, for the first combination that cannot work."""
    _weights(deployment)
    _speculation(deployment)
    _graphs(deployment)
    {"native": _native, "sglang": _sglang, "vllm": _vllm}[deployment.engine.kind](deployment)
    _extra_args(deployment)
    _service(deployment)
    _supervisor(deployment)


def is_loopback(address: str) -> bool:
    """Whether only the host itself can reach ``address``."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _weights(deployment: Declaration) -> None:
    algorithm, drafter = deployment.speculation.algorithm, deployment.drafter
    if deployment.model.demo:
        if deployment.engine.kind != "native":
            refuse("model.demo needs the native engine", 'set engine.kind = "native", or name the weights')
        if drafter:
            refuse("[drafter] beside model.demo", "leave it out: the demo brings its own drafter")
    elif algorithm in ("ddtree", "dflash") and not drafter:
        refuse(
            f'speculation.algorithm = "{algorithm}" without a drafter', "add [drafter] path = its folder on the host"
        )
    if algorithm in ("none", "custom") and drafter:
        refuse(
            f'[drafter] with speculation.algorithm = "{algorithm}"', "leave [drafter] out, or choose ddtree or dflash"
        )


def _speculation(deployment: Declaration) -> None:
    speculation = deployment.speculation
    if speculation.algorithm in ("none", "custom"):
        for key in OF_DRAFTS:
            if getattr(speculation, key) is not None:
                refuse(
                    f'speculation.{key} has no meaning with algorithm = "{speculation.algorithm}"',
                    "leave it out, or choose ddtree or dflash",
                )
        if deployment.expect.tau_floor is not None and speculation.algorithm == "none":
            refuse('expect.tau_floor has no meaning with algorithm = "none"', "leave it out")
    if speculation.algorithm == "dflash":
        for key in OF_TREES:
            if getattr(speculation, key) is not None:
                refuse(f"speculation.{key} does not apply to a chain", 'leave it out, or set algorithm = "ddtree"')
        if speculation.budget == "auto":
            refuse("speculation.budget = auto does not apply to a chain", 'write a number, or set algorithm = "ddtree"')
    window, block = speculation.draft_window, speculation.block_size
    if window is not None and block is not None and window < block:
        refuse(f"speculation.draft_window {window} is below block_size {block}", "make the window at least one block")


def _graphs(deployment: Declaration) -> None:
    runtime = deployment.runtime
    if runtime.cuda_graph_sizes and runtime.cuda_graphs is False:
        refuse("runtime.cuda_graph_sizes with cuda_graphs = false", "leave one of them out")
    if runtime.device == "cpu" and (runtime.cuda_graphs or runtime.cuda_graph_sizes or deployment.expect.cuda_graphs):
        refuse('CUDA graphs with runtime.device = "cpu"', "leave cuda_graphs and cuda_graph_sizes out")
    if deployment.expect.cuda_graphs and runtime.cuda_graphs is False:
        refuse("expect.cuda_graphs = true with runtime.cuda_graphs = false", "leave one of them out")


def _native(deployment: Declaration) -> None:
    runtime, parallelism = deployment.runtime, deployment.parallelism
    for key in ("tp", "ep", "pp", "dp", "nodes"):
        if getattr(parallelism, key) > 1:
            refuse(f"parallelism.{key} with the native engine, which runs on one device", 'set engine.kind = "sglang"')
    if parallelism.dp_attention:
        refuse("parallelism.dp_attention with the native engine", 'set engine.kind = "sglang"')
    for name, weights in (("model", deployment.model), ("drafter", deployment.drafter)):
        if weights and weights.hub and not weights.path:
            refuse(
                f"{name}.hub without {name}.path: the native engine reads folders",
                f"set {name}.path, and put the weights there with: ddtree fetch",
            )
    if deployment.model.trust_remote_code:
        refuse("model.trust_remote_code with the native engine, which runs no code of models", "leave it out")
    if deployment.model.attention == "mla":
        refuse('model.attention = "mla" with the native engine', 'set engine.kind = "sglang"')
    if deployment.speculation.algorithm == "custom":
        refuse('speculation.algorithm = "custom" with the native engine', "choose ddtree, dflash or none")
    for key in ("cuda_graph_sizes", "nvls", "attention_backend"):
        if getattr(runtime, key):
            refuse(f"runtime.{key} with the native engine, which has no such setting", "leave it out")
    if runtime.cuda_graphs is False:
        refuse(
            "runtime.cuda_graphs = false with the native engine, which cannot be told so",
            "leave it out; it captures graphs where a GPU can",
        )
    if runtime.dtype == "float16":
        refuse('runtime.dtype = "float16" with the native engine', "choose auto, float32 or bfloat16")


def _sglang(deployment: Declaration) -> None:
    parallelism, speculation, runtime = deployment.parallelism, deployment.speculation, deployment.runtime
    for key in ("threads", "exact"):
        if getattr(runtime, key):
            refuse(f"runtime.{key} with sglang, which has no such setting", "leave it out")
    if parallelism.tp % parallelism.ep:
        refuse(f"parallelism.ep {parallelism.ep} does not divide tp {parallelism.tp}", "choose ep = tp or a divisor")
    if parallelism.dp_attention and (parallelism.dp == 1 or parallelism.tp % parallelism.dp):
        refuse(
            f"parallelism.dp_attention with dp {parallelism.dp} and tp {parallelism.tp}",
            "choose a dp above 1 that divides tp",
        )
    if runtime.nvls and parallelism.tp == 1:
        refuse("runtime.nvls with parallelism.tp = 1, where nothing is reduced", "leave it out")
    if speculation.algorithm in ("ddtree", "dflash"):
        _sglang_speculation(deployment)
    if deployment.secrets.api_key and not deployment.service.allow_key_in_log:
        refuse(
            "secrets.api_key with sglang, which writes its key into its log",
            "listen on 127.0.0.1 behind a proxy that asks for the key, or set service.allow_key_in_log = true",
        )


def _sglang_speculation(deployment: Declaration) -> None:
    parallelism, speculation, runtime = deployment.parallelism, deployment.speculation, deployment.runtime
    told = f'speculation.algorithm = "{speculation.algorithm}"'
    if parallelism.pp > 1:
        refuse(f"parallelism.pp {parallelism.pp} with {told}", 'set pp = 1, or algorithm = "none"')
    if parallelism.dp_attention:
        refuse(f"parallelism.dp_attention with {told}", 'leave it out, or set algorithm = "none"')
    if runtime.device != "cuda":
        refuse(
            f'runtime.device = "{runtime.device}" with {told} in sglang',
            'set device = "cuda", or use the native engine',
        )
    if speculation.algorithm == "dflash":
        if speculation.budget is not None:
            refuse("speculation.budget with a chain in sglang", "set block_size: a chain has block_size - 1 nodes")
        return
    if not isinstance(speculation.budget, int):
        refuse(
            f"speculation.budget is {speculation.budget or 'missing'} with sglang", "write a number of nodes, such as 8"
        )
    for key in ("topk_cap", "budget"):
        if getattr(speculation, key) == 1 and speculation.draft_temperature is not None:
            refuse(
                f"speculation.draft_temperature with {key} = 1, which makes the tree a chain",
                f"leave it out, or raise {key}",
            )
    backend = runtime.attention_backend
    if deployment.model.attention == "mla":
        if backend not in TREE_BACKENDS_MLA:
            refuse(
                f"runtime.attention_backend is {backend or 'missing'}, and on MLA it must be one that verifies trees",
                'set it to "triton", or "fa3" on Hopper',
            )
    elif backend is not None and backend not in TREE_BACKENDS:
        refuse(
            f'runtime.attention_backend = "{backend}" cannot verify trees', f"choose one of {', '.join(TREE_BACKENDS)}"
        )
    for argument in runtime.extra_args:
        if what := NOT_WITH_TREES.get(argument.split("=", 1)[0]):
            refuse(f"runtime.extra_args has {argument}: {what} does not work with draft trees", "leave it out")


def _vllm(deployment: Declaration) -> None:
    parallelism, speculation, runtime = deployment.parallelism, deployment.speculation, deployment.runtime
    if speculation.algorithm == "ddtree":
        refuse('speculation.algorithm = "ddtree" with vllm, which has no draft trees', "choose dflash, or sglang")
    if speculation.algorithm == "dflash":
        if speculation.block_size is None:
            refuse("speculation.block_size is missing with vllm", "write the drafter's block size")
        if parallelism.pp > 1:
            refuse(f'parallelism.pp {parallelism.pp} with speculation.algorithm = "dflash"', "set pp = 1")
        for key in ("budget", "draft_window"):
            if getattr(speculation, key) is not None:
                refuse(f"speculation.{key} with vllm, which has no such setting", "leave it out")
    if parallelism.ep not in (1, parallelism.tp * parallelism.dp):
        refuse(
            f"parallelism.ep {parallelism.ep} with vllm, which spreads experts over all GPUs or none",
            "set ep = tp * dp, or 1",
        )
    if parallelism.dp_attention:
        refuse("parallelism.dp_attention with vllm, which decides that itself", "leave it out")
    for key in ("nvls", "threads", "exact"):
        if getattr(runtime, key):
            refuse(f"runtime.{key} with vllm, which has no such setting", "leave it out")


def _extra_args(deployment: Declaration) -> None:
    engine, custom = deployment.engine.kind, deployment.speculation.algorithm == "custom"
    arguments = deployment.runtime.extra_args
    for argument in arguments:
        if custom and is_own_speculation(engine, argument):
            continue
        if key := key_of(engine, argument):
            refuse(f"runtime.extra_args has {argument.split('=', 1)[0]}", f"that is said by {key}")
        if _SECRET_FLAG.match(argument):
            refuse(
                f"runtime.extra_args has {argument.split('=', 1)[0]}, and everybody on the host reads command lines",
                "give that secret by [secrets.env], or by a file",
            )
    if custom and not any(is_own_speculation(engine, argument) for argument in arguments):
        refuse(
            'speculation.algorithm = "custom" without a flag for it in runtime.extra_args',
            'add the engine\'s own, or set algorithm = "none"',
        )


def _service(deployment: Declaration) -> None:
    service, key = deployment.service, deployment.secrets.api_key
    if not is_loopback(service.address) and not key and not service.allow_unauthenticated:
        refuse(
            f"service.address {service.address} can be reached from other machines, and there is no key",
            "add [secrets] api_key = { file = ... }, or set service.allow_unauthenticated = true",
        )
    if key and service.allow_unauthenticated:
        refuse("service.allow_unauthenticated beside secrets.api_key", "keep one of them")
    if service.allow_key_in_log and not (key and deployment.engine.kind == "sglang"):
        refuse("service.allow_key_in_log without a key for sglang", "leave it out")
    twice = set(deployment.runtime.env) & set(deployment.secrets.env)
    if twice:
        refuse(f"{min(twice)} is in runtime.env and in secrets.env", "keep one of them")
    for name in {*deployment.runtime.env, *deployment.secrets.env}:
        if name in {"INVOCATION_ID", "CREDENTIALS_DIRECTORY", "LD_PRELOAD"} or (name == "VLLM_API_KEY" and key):
            refuse(f"environment variable {name} is set by ddtree or refused", "leave it out")


def _supervisor(deployment: Declaration) -> None:
    service, host = deployment.service, deployment.host
    if service.supervisor == "systemd":
        return
    if host.privilege is not None:
        refuse(
            f'host.privilege = "{host.privilege}" with supervisor process, which runs as the user who deploys',
            "leave it out",
        )
    if service.restart not in (None, "no"):
        refuse(
            f'service.restart = "{service.restart}" with supervisor process, which starts nothing again',
            'leave it out, or set service.supervisor = "systemd"',
        )
    if service.log == "journal":
        refuse('service.log = "journal" with supervisor process', "leave it out, or name a file")
    for key in (
        "user",
        "enabled",
        "restart_delay_s",
        "max_restarts",
        "read_write_paths",
        "memory_max_gib",
        "cpu_quota_percent",
        "open_files",
        "tasks_max",
    ):
        if key in service.model_fields_set:
            refuse(f"service.{key} with supervisor process, which cannot keep it", "leave it out, or use systemd")
