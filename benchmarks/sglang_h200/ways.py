"""The servers of the benchmark: what each runs with, and what it is held against."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

COMMON = (
    "--sampling-backend pytorch --cuda-graph-backend-prefill=disabled --mem-fraction-static 0.85 "
    "--context-length 4096 --skip-server-warmup --enable-metrics --max-running-requests 16 --log-level info "
    "--random-seed 1 --sleep-on-idle"
)
FEW_GRAPHS, MANY_GRAPHS = "--cuda-graph-bs-decode 1 2 4", "--cuda-graph-max-bs 16"
POOL = "--max-total-tokens 65536"
EXACT = {"EXACT_OPS": "1", "TRITON_F32_DEFAULT": "ieee"}
FA2_ONLY = {"FLASHINFER_FA2_ONLY": "1"}

Texts = Literal["four at a time", "alone", "alone and equal"]


@dataclass(frozen=True)
class Way:
    """One server.

    Attributes:
        flags: after the model's; ``SPEC NAME`` stands for the drafter and the algorithm.
        against: the way that its texts are compared with; empty for none.
        environment: on top of the common one.
        timed: whether its speed is taken, so that it records graphs for every batch size.
        texts: how texts are taken, always from an empty cache, and whether they must be equal to the last token.
        moe: latent size of the tiny mixture of experts that it serves; None for the real pair.
    """

    flags: str
    against: str = "ar"
    environment: dict[str, str] = field(default_factory=dict)
    timed: bool = False
    texts: Texts = "four at a time"
    moe: int | None = None

    @property
    def is_exact(self) -> bool:
        """In float32, where texts part only where two tokens are alike to about 1e-5."""
        return "EXACT_OPS" in self.environment


def tree(budget: int | str, backend: str = "fa3") -> str:
    return f"--attention-backend {backend} SPEC DDTREE --speculative-ddtree-budget {budget}"


def config(**switches: bool) -> dict[str, str]:
    """The plugin's switches that have no flag; never a child server beside those of the benchmark."""
    return {"DDTREE_SGLANG_CONFIG": json.dumps({"probe": False} | switches)}


def moe(latent: int, ranks: str = "", environment: dict[str, str] | None = None) -> dict[str, Way]:
    """Plain decoding and trees of the tiny mixture of experts, on each backend.

    Args:
        latent: see `Way.moe`; 512 in bfloat16, 256 in float32 on Triton.
        ranks: prefix of the names and flags of the parallelism.
        environment: of all.
    """
    prefix, flags = {"": ("moe", ""), "tp2": ("tp2", TP2), "ep2": ("ep2", f"{TP2} --ep-size 2")}[ranks]
    backends = ("fa3", "triton") if latent == 512 else ("triton",)
    found = {}
    for backend in backends:
        end = "-exact" if latent != 512 else "" if backend == "fa3" else f"-{backend}"
        dtype = " --dtype float32" if latent != 512 else ""
        more = dict(EXACT if latent != 512 else {}) | (environment or {})
        common = f"{flags}{dtype} --disable-shared-experts-fusion"
        found[f"{prefix}-ar{end}"] = Way(
            f"--attention-backend {backend} {common}", "", more, texts="alone", moe=latent,
        )  # fmt: skip
        found[f"{prefix}-16{end}"] = Way(
            f"{tree(16, backend)} {common}", f"{prefix}-ar{end}", more | config(check_ranks=bool(ranks)), moe=latent
        )
    return found


# Left on, FlashInfer's fused all-reduce has every rank wait for a compiler, which lacks a header in the kit.
TP2 = "--tp-size 2 --disable-custom-all-reduce --enforce-disable-flashinfer-allreduce-fusion"
AR = Way("--attention-backend fa3", "", timed=True, texts="alone")
GRAMMAR = "--grammar-backend xgrammar"

WAYS: dict[str, Way] = {
    "ar": AR,
    "dflash": Way(
        "--attention-backend fa3 SPEC DFLASH --speculative-num-draft-tokens 16", timed=True, texts="alone",
    ),
    "chain": Way(tree(15) + " --speculative-ddtree-topk-cap 1", "dflash", timed=True, texts="alone and equal"),
    "off": Way(tree(0), texts="alone and equal"),
    "tree8": Way(tree(8), timed=True),
    "tree16": Way(tree(16), timed=True),
    "tree32": Way(tree(32), timed=True),
    "tree64": Way(tree(64), timed=True),
    "tree32-split": Way(tree(32), environment=config(fold_tail=False), timed=True),
    "tree32-mask": Way(tree(32), environment=config(own_tables=False), timed=True),
    "triton32": Way(tree(32, "triton"), "ar-triton", timed=True),
    "ar-triton": Way("--attention-backend triton", "", texts="alone"),
    "triton16": Way(tree(16, "triton"), "ar-triton"),
    "triton16-page64": Way(tree(16, "triton") + " --page-size 64", "ar-triton"),
    "ar-flashinfer": Way("--attention-backend flashinfer", "", texts="alone"),
    "flashinfer16": Way(tree(16, "flashinfer"), "ar-flashinfer"),
    "ar-fa2": Way("--attention-backend flashinfer", "", FA2_ONLY, texts="alone"),
    "fa2-16": Way(tree(16, "flashinfer"), "ar-fa2", FA2_ONLY),
    "fa2-16-page64": Way(tree(16, "flashinfer") + " --page-size 64", "ar-fa2", FA2_ONLY),
    "fa3-page64": Way(tree(16) + " --page-size 64"),
    "eager16": Way(tree(16) + " --disable-cuda-graph"),
    "sync16": Way(tree(16) + " --disable-overlap-schedule"),
    "window": Way(tree(16) + " --speculative-draft-window-size 128"),
    # Counts on few tokens of those who run already, so it admits all and must retract some.
    "small-pool": Way(tree(16).replace("SPEC", "--max-total-tokens 3072 --schedule-conservativeness 0.05 SPEC")),
    "retract16": Way(tree(16), environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}),
    "ar-exact": Way("--attention-backend triton --dtype float32", "", EXACT, texts="alone"),
    "tree32-exact": Way(tree(32, "triton") + " --dtype float32", "ar-exact", EXACT),
    # A drafter's window must not move the target's text, and in float32 nothing else moves it.
    "window-exact": Way(tree(32, "triton") + " --dtype float32 --speculative-draft-window-size 128", "ar-exact", EXACT),
    "ar-grammar": Way(f"--attention-backend fa3 {GRAMMAR}", "", texts="alone"),
    "grammar16": Way(f"{tree(16)} {GRAMMAR}", "ar-grammar"),
    "moe-count": Way(
        f"{tree(64)} --disable-shared-experts-fusion", "moe-ar", config(count_experts=True), texts="alone", moe=512,
    ),
} | moe(512) | moe(256) | moe(512, "tp2") | moe(256, "tp2") | moe(512, "ep2")  # fmt: skip

EXACT_MOST = 0.01
"""Largest gap of a float32 parting that is rounding, in log-probability."""


def arguments(way: Way, target: str, drafter: str) -> list[str]:
    """Flags of ``sglang.launch_server``, ports left out.

    Args:
        target: folder of the way's target; drafter: of its drafter.
    """
    spec = f"--speculative-draft-model-path {drafter} --speculative-algorithm"
    graphs = MANY_GRAPHS if way.timed or way.is_exact else FEW_GRAPHS
    pool = "" if "--max-total-tokens" in way.flags else POOL
    line = f"--model-path {target} {COMMON} {graphs} {pool} {way.flags}"
    return line.replace("SPEC", spec).split()
