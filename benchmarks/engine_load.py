"""Throughput of the engine by concurrency; a piece of `engine_h200.py`."""

import argparse
import cProfile
import pstats
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from prompt_files import read_prompts

from ddtree import Engine, SamplingParams, Speculation
from ddtree.engine.prompt import encode_prompt


def load(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second with so many requests in flight, every way in turn at each concurrency.

    `tok_s` is over the whole of a run, its beginning and end included; `tok_s_full` over the part of it in which every
    place was taken: from the first full step until no request was left to take a place that falls free. `host_share`
    is the share of the time in which the host did not wait for the device.
    """
    engine = Engine.load(args.model, args.draft, dtype=args.dtype, max_model_len=1024, max_batch=64, graphs="on")
    texts = read_prompts(args.prompts, ("gsm8k_test100", "humaneval"), args.count)
    prompts = [encode_prompt(text, engine.tokenizer, engine.target.config.vocab_size) for text in texts]
    ways = {"ar": Speculation("ar"), "chain": Speculation("chain"), "auto": Speculation("tree")}
    ways |= {f"tree {b}": Speculation("tree", b) for b in args.budgets if b < 100}
    rows = []
    for concurrency in args.concurrency:
        n_requests = max(args.requests_per_place * concurrency, 16)
        requests = (prompts * -(-n_requests // len(prompts)))[:n_requests]
        seen: dict[str, list[ClosedLoop]] = {name: [] for name in ways}
        for repeat in range(args.repeats + 1):  # the first is to warm up
            for name in list(ways) if repeat % 2 else list(ways)[::-1]:
                run = closed_loop(engine, requests, concurrency, ways[name])
                if repeat:
                    seen[name].append(run)
        keys = "tok_s", "tok_s_full", "tau", "host_share"
        taken = Counter(b for run in seen["auto"] for b in run.budgets)
        rows.append({
            "concurrency": concurrency, "requests": len(requests), "n": args.repeats,
            **{
                key: {name: round(statistics.median(vars(run)[key] for run in runs), 3) for name, runs in seen.items()}
                for key in keys
            },
            "auto_budgets": {str(b): round(n / taken.total(), 3) for b, n in sorted(taken.items())},
        })  # fmt: skip
        for key in keys[:2]:
            best = max(v for k, v in rows[-1][key].items() if k != "auto")
            rows[-1][f"auto_against_best_{key}"] = round(rows[-1][key]["auto"] / best, 3)
        print(rows[-1], flush=True)
    most = args.concurrency[-1]
    with cProfile.Profile() as profile:
        closed_loop(engine, (prompts * 16)[: 8 * most], most, ways["auto"])
    functions = pstats.Stats(profile)
    functions.sort_stats("tottime").print_stats(30)
    costs = {
        f"{batch} x {budget}": round(ms, 4)
        for (batch, budget), ms in sorted(engine._scheduler.round_costs_ms().items())
    }
    print(costs, flush=True)
    return {"facts": engine.facts(), "auto_costs_ms": costs, "rows": rows}


@dataclass(frozen=True)
class ClosedLoop:
    """What a run of `closed_loop` came to; see `load`."""

    tok_s: float
    tok_s_full: float
    tau: float
    host_share: float
    budgets: list[int]


def closed_loop(engine: Engine, requests: list[list[int]], concurrency: int, speculation: Speculation) -> ClosedLoop:
    """Answer requests, so many at a time, each place taken again as soon as it falls free."""
    params, waited = SamplingParams(max_new_tokens=256), 0.0
    synchronize = torch.cuda.Event.synchronize

    def timed(event: torch.cuda.Event) -> None:
        nonlocal waited
        began = time.perf_counter()
        synchronize(event)
        waited += time.perf_counter() - began

    torch.cuda.Event.synchronize = timed  # type: ignore[method-assign]
    pending, running, done = list(requests), [], []
    full_from, full_to = (0.0, 0), (0.0, 0)  # time and tokens
    began = time.perf_counter()
    try:
        while pending or running:
            while pending and len(running) < concurrency:
                running.append(engine.submit(pending.pop(), params, speculation=speculation))
            engine.step()
            now = time.perf_counter(), sum(len(r.output) for r in done) + sum(len(r.output) for r in running)
            if len(running) == concurrency and not full_from[0]:
                full_from = now
            if pending:
                full_to = now
            done += [r for r in running if r.finish_reason]
            running = [r for r in running if not r.finish_reason]
    finally:
        torch.cuda.Event.synchronize = synchronize  # type: ignore[method-assign]
    elapsed = time.perf_counter() - began
    return ClosedLoop(
        tok_s=sum(len(r.output) for r in done) / elapsed,
        tok_s_full=(full_to[1] - full_from[1]) / (full_to[0] - full_from[0]),
        tau=sum(sum(r.stats.accepted_lengths) for r in done) / sum(r.stats.rounds for r in done),
        host_share=1 - waited / elapsed,
        budgets=[b for r in done for b in r.stats.round_budgets],
    )
