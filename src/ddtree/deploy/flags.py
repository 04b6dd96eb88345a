"""Which flag of an engine says which key of a deployment file.

The commands are written from this table, further flags that say the same are refused by it, and tests hold it against
the engines' own parsers.
"""

from __future__ import annotations

from types import MappingProxyType

from ddtree.deploy.sections import EngineKind

NATIVE = MappingProxyType(
    {
        "--model": "model.path",
        "--served-model-name": "model.served_name",
        "--draft": "drafter.path",
        "--mode": "speculation.algorithm",
        "--budget": "speculation.budget",
        "--top-k-cap": "speculation.topk_cap",
        "--block-size": "speculation.block_size",
        "--draft-window": "speculation.draft_window",
        "--draft-temperature": "speculation.draft_temperature",
        "--device": "runtime.device",
        "--dtype": "runtime.dtype",
        "--memory-fraction": "runtime.memory_fraction",
        "--max-batch": "runtime.max_running_requests",
        "--max-model-len": "runtime.context_length",
        "--threads": "runtime.threads",
        "--exact": "runtime.exact",
        "--host": "service.address",
        "--port": "service.port",
        "--allow-unauthenticated": "service.allow_unauthenticated",
        "--api-key-file": "secrets.api_key",
    }
)
SGLANG = MappingProxyType(
    {
        "--model-path": "model.path",
        "--revision": "model.revision",
        "--served-model-name": "model.served_name",
        "--trust-remote-code": "model.trust_remote_code",
        "--speculative-draft-model-path": "drafter.path",
        "--speculative-draft-model-revision": "drafter.revision",
        "--tp-size": "parallelism.tp",
        "--ep-size": "parallelism.ep",
        "--moe-dp-size": "parallelism.ep",
        "--pp-size": "parallelism.pp",
        "--dp-size": "parallelism.dp",
        "--enable-dp-attention": "parallelism.dp_attention",
        "--nnodes": "parallelism.nodes",
        "--node-rank": "parallelism.node_rank",
        "--dist-init-addr": "parallelism.init_address",
        "--speculative-algorithm": "speculation.algorithm",
        "--speculative-ddtree-budget": "speculation.budget",
        "--speculative-ddtree-topk-cap": "speculation.topk_cap",
        "--speculative-ddtree-draft-temperature": "speculation.draft_temperature",
        "--speculative-dflash-block-size": "speculation.block_size",
        "--speculative-draft-window-size": "speculation.draft_window",
        "--device": "runtime.device",
        "--dtype": "runtime.dtype",
        "--cuda-graph-backend-decode": "runtime.cuda_graphs",
        "--cuda-graph-backend-prefill": "runtime.cuda_graphs",
        "--cuda-graph-bs-decode": "runtime.cuda_graph_sizes",
        "--enable-nccl-nvls": "runtime.nvls",
        "--attention-backend": "runtime.attention_backend",
        "--mem-fraction-static": "runtime.memory_fraction",
        "--max-running-requests": "runtime.max_running_requests",
        "--context-length": "runtime.context_length",
        "--host": "service.address",
        "--port": "service.port",
        "--config": "secrets.api_key",
        "--enable-metrics": "what ddtree verify reads; it is always given",
    }
)
VLLM = MappingProxyType(
    {
        "--revision": "model.revision",
        "--served-model-name": "model.served_name",
        "--trust-remote-code": "model.trust_remote_code",
        "--tensor-parallel-size": "parallelism.tp",
        "--enable-expert-parallel": "parallelism.ep",
        "--pipeline-parallel-size": "parallelism.pp",
        "--data-parallel-size": "parallelism.dp",
        "--nnodes": "parallelism.nodes",
        "--node-rank": "parallelism.node_rank",
        "--master-addr": "parallelism.init_address",
        "--master-port": "parallelism.init_address",
        "--speculative-config": "speculation and drafter",
        "--dtype": "runtime.dtype",
        "--enforce-eager": "runtime.cuda_graphs",
        "--cudagraph-capture-sizes": "runtime.cuda_graph_sizes",
        "--attention-backend": "runtime.attention_backend",
        "--gpu-memory-utilization": "runtime.memory_fraction",
        "--max-num-seqs": "runtime.max_running_requests",
        "--max-model-len": "runtime.context_length",
        "--host": "service.address",
        "--port": "service.port",
    }
)
FLAGS: MappingProxyType[EngineKind, MappingProxyType[str, str]] = MappingProxyType(
    {"native": NATIVE, "sglang": SGLANG, "vllm": VLLM}
)

OTHER_SPELLINGS: MappingProxyType[EngineKind, MappingProxyType[str, str]] = MappingProxyType(
    {
        "native": MappingProxyType({"--api-key": "secrets.api_key", "--insecure": "service.allow_unauthenticated"}),
        "sglang": MappingProxyType(
            {
                "--model": "model.path",
                "--tensor-parallel-size": "parallelism.tp",
                "--tp": "parallelism.tp",
                "--expert-parallel-size": "parallelism.ep",
                "--ep": "parallelism.ep",
                "--pipeline-parallel-size": "parallelism.pp",
                "--data-parallel-size": "parallelism.dp",
                "--nccl-init-addr": "parallelism.init_address",
                "--speculative-draft-model": "drafter.path",
                "--speculative-num-draft-tokens": "speculation.budget and block_size",
                "--speculative-eagle-topk": "speculation.topk_cap",
                "--speculative-dflash-draft-window-size": "speculation.draft_window",
                "--disable-cuda-graph": "runtime.cuda_graphs",
                "--disable-decode-cuda-graph": "runtime.cuda_graphs",
                "--cuda-graph-config": "runtime.cuda_graphs",
                "--cuda-graph-bs": "runtime.cuda_graph_sizes",
                "--decode-attention-backend": "runtime.attention_backend",
                "--prefill-attention-backend": "runtime.attention_backend",
                "--api-key": "secrets.api_key",
                "--admin-api-key": "secrets.api_key",
            }
        ),
        "vllm": MappingProxyType(
            {
                "--model": "model.path",
                "-tp": "parallelism.tp",
                "-pp": "parallelism.pp",
                "-dp": "parallelism.dp",
                "-ep": "parallelism.ep",
                "-n": "parallelism.nodes",
                "-r": "parallelism.node_rank",
                "-sc": "speculation and drafter",
                "--api-key": "secrets.api_key",
            }
        ),
    }
)
"""Flags that say what a key says, but are not the ones that commands are written with."""

ENGINES_OWN_SPECULATION: MappingProxyType[EngineKind, tuple[str, ...]] = MappingProxyType(
    {"native": (), "sglang": ("--speculative-",), "vllm": ("--speculative-config", "-sc")}
)
"""Flags that algorithm "custom" leaves to runtime.extra_args; those that end in a dash stand for a whole family."""


def key_of(engine: EngineKind, argument: str) -> str | None:
    """The key of the file that says what ``argument`` of a command line says; None where no key does.

    argparse takes a unique beginning of a flag for the flag: such beginnings count too.
    """
    flag = argument.split("=", 1)[0].replace("_", "-")
    if not flag.startswith("-"):
        return None
    known = FLAGS[engine] | OTHER_SPELLINGS[engine]
    if flag in known:
        return known[flag]
    if not flag.startswith("--") or len(flag) < 4:
        return None
    return next((key for name, key in known.items() if name.startswith(flag)), None)


def is_own_speculation(engine: EngineKind, argument: str) -> bool:
    """Whether ``argument`` is one of those that algorithm "custom" leaves to runtime.extra_args."""
    flag = argument.split("=", 1)[0].replace("_", "-")
    return any(
        flag.startswith(known) if known.endswith("-") else flag == known for known in ENGINES_OWN_SPECULATION[engine]
    )
