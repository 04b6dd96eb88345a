"""What a server is held to: from a deployment file, or for a bare address from flags and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ddtree.deploy.deployment import Deployment

Speculates = Literal["yes", "none"]

DEFAULT_TAU_FLOOR = 1.2
"""Above what random drafters reach: a tree of 64 nodes from random weights commits 1.0 to 1.1 tokens a round, the
weakest trained drafter known 1.5."""


@dataclass(frozen=True)
class Expectation:
    """Declared facts; what is None or absent was not declared.

    Attributes:
        engine: `native`, `sglang` or `vllm`.
        model_name: the name that clients give.
        speculates: `yes`, or `none` for one token a step.
        settings: by the names of `ddtree.verify.effective.SETTINGS`.
        tau_floor: committed tokens per round, at least.
        is_tau_floor_declared: somebody chose that floor; else what the drafter's own folder promises may raise it.
        tok_s_floor: decode speed of one request, at least.
        graphs: CUDA graphs are replayed, or are not.
        unit: the service on this machine that the server should be.
        command: what that service was rendered to run, without its program.
        origin: where this was declared, for people.
    """

    engine: str | None = None
    model_name: str | None = None
    speculates: Speculates = "yes"
    settings: Mapping[str, Any] = field(default_factory=dict)
    tau_floor: float = DEFAULT_TAU_FLOOR
    is_tau_floor_declared: bool = False
    tok_s_floor: float | None = None
    graphs: bool | None = None
    unit: str | None = None
    command: tuple[str, ...] = ()
    origin: str = "command line"


def from_deployment(deployment: Deployment, origin: str) -> Expectation:
    """What a deployment file promises."""
    speculation, runtime, parallel = deployment.speculation, deployment.runtime, deployment.parallelism
    engine = deployment.engine.kind
    declared: dict[str, Any] = {
        "budget": speculation.budget,
        "top_k_cap": speculation.topk_cap,
        "block_size": speculation.block_size,
        "draft_temperature": speculation.draft_temperature,
        "context_length": runtime.context_length,
        "max_running_requests": runtime.max_running_requests,
        "attention_backend": runtime.attention_backend,
        "memory_fraction": runtime.memory_fraction,
        "threads": runtime.threads,
        "dtype": None if runtime.dtype == "auto" else runtime.dtype,
        "model": _weights(deployment.model),
        "drafter": _weights(deployment.drafter),
        "model_revision": deployment.model.revision,
        "drafter_revision": deployment.drafter.revision if deployment.drafter else None,
    }
    declared = {name: value for name, value in declared.items() if value is not None}
    if speculation.algorithm != "custom":
        declared["algorithm"] = speculation.algorithm
    if speculation.algorithm in ("ddtree", "dflash") and engine != "vllm":
        declared["draft_window"] = speculation.draft_window  # None says: the whole context
    if engine != "vllm":
        declared["device"] = runtime.device
        declared |= {"tp": parallel.tp, "ep": parallel.ep, "pp": parallel.pp, "dp": parallel.dp}
    if engine == "native":
        declared["exact"] = runtime.exact
    if engine == "sglang":
        declared["nvls"] = runtime.nvls
    return Expectation(
        engine=engine,
        model_name=deployment.served_name,
        speculates="none" if speculation.algorithm == "none" else "yes",
        settings=declared,
        tau_floor=deployment.expect.tau_floor or DEFAULT_TAU_FLOOR,
        is_tau_floor_declared=deployment.expect.tau_floor is not None,
        tok_s_floor=deployment.expect.tok_s_floor,
        graphs=None if runtime.device == "cpu" else deployment.expects_cuda_graphs,
        origin=origin,
    )


def _weights(weights: Any) -> str | None:
    """The folder, or the name on the hub."""
    return (weights.path or weights.hub) if weights is not None else None
