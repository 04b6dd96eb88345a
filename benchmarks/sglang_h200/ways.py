"""The servers of the benchmark: what each runs with, and what it is held against."""

from __future__ import annotations

from dataclasses import dataclass, field

COMMON = (
    "--sampling-backend pytorch --cuda-graph-backend-prefill=disabled --mem-fraction-static 0.6 "
    "--context-length 4096 --skip-server-warmup --enable-metrics --max-running-requests 16 --log-level info "
    "--random-seed 1 --sleep-on-idle"
)
FEW_GRAPHS, MANY_GRAPHS = "--cuda-graph-bs-decode 1 2 4", "--cuda-graph-max-bs 16"
POOL = "--max-total-tokens 65536"
EXACT = {"EXACT_OPS": "1", "TRITON_F32_DEFAULT": "ieee"}


@dataclass(frozen=True)
class Way:
    """One server.

    Attributes:
        flags: after the model's; ``SPEC NAME`` stands for the drafter and the algorithm.
        against: the way that its texts are compared with; empty for none.
        environment: on top of the common one.
        timed: whether its speed is taken, so that it records graphs for every batch size.
        alone: texts one prompt at a time from an empty cache, so that they can be equal to the last token.
    """

    flags: str
    against: str = "ar"
    environment: dict[str, str] = field(default_factory=dict)
    timed: bool = False
    alone: bool = False


def tree(budget: int | str, backend: str = "fa3") -> str:
    return f"--attention-backend {backend} SPEC DDTREE --speculative-ddtree-budget {budget}"


WAYS: dict[str, Way] = {
    "ar": Way("--attention-backend fa3", "", timed=True, alone=True),
    "dflash": Way(
        "--attention-backend fa3 SPEC DFLASH --speculative-num-draft-tokens 16", timed=True, alone=True,
    ),
    "chain": Way(tree(15) + " --speculative-ddtree-topk-cap 1", "dflash", alone=True),
    "off": Way(tree(0), alone=True),
    "tree16": Way(tree(16), timed=True),
    "tree32": Way(tree(32), timed=True),
    "tree64": Way(tree(64), timed=True),
    "tree8": Way(tree(8), timed=True),
    "tree32-split": Way(tree(32), environment={"DDTREE_SGLANG_CONFIG": '{"fold_tail": false}'}, timed=True),
    "ar-triton": Way("--attention-backend triton", ""),
    "triton16": Way(tree(16, "triton"), "ar-triton"),
    "triton16-page64": Way(tree(16, "triton") + " --page-size 64", "ar-triton"),
    "ar-flashinfer": Way("--attention-backend flashinfer", ""),
    "flashinfer16": Way(tree(16, "flashinfer"), "ar-flashinfer"),
    "fa3-page64": Way(tree(16) + " --page-size 64"),
    "eager16": Way(tree(16) + " --disable-cuda-graph"),
    "sync16": Way(tree(16) + " --disable-overlap-schedule"),
    "window": Way(tree(16) + " --speculative-draft-window-size 128"),
    # Counts on few tokens of those who run already, so it admits all and must retract some.
    "small-pool": Way(tree(16).replace("SPEC", "--max-total-tokens 3072 --schedule-conservativeness 0.05 SPEC")),
    "retract16": Way(tree(16), environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}),
    "ar-exact": Way("--attention-backend triton --dtype float32", "", environment=EXACT),
    "tree32-exact": Way(tree(32, "triton") + " --dtype float32", "ar-exact", environment=EXACT),
}  # fmt: skip

EXACT_MOST = 0.01
"""Largest gap of a float32 parting that is rounding, in log-probability."""


def arguments(way: Way, target: str, drafter: str) -> list[str]:
    """Flags of ``sglang.launch_server``, ports left out."""
    spec = f"--speculative-draft-model-path {drafter} --speculative-algorithm"
    graphs = MANY_GRAPHS if way.timed or "exact" in way.against or way.environment is EXACT else FEW_GRAPHS
    pool = "" if "--max-total-tokens" in way.flags else POOL
    line = f"--model-path {target} {COMMON} {graphs} {pool} {way.flags}"
    return line.replace("SPEC", spec).split()
