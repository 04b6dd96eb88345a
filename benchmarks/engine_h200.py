"""The engine on one GPU, measured in pieces that each take minutes (bf16 unless a piece says otherwise).

    python benchmarks/engine_h200.py pair --model DIR --draft DIR --prompts DIR    tok/s and tau, batch 1, interleaved
    python benchmarks/engine_h200.py gate ...      near-ties and faults over all tokens of trees
    python benchmarks/engine_h200.py exact ...     exact mode: differing tokens by mode and batch, and what it costs
    python benchmarks/engine_h200.py host ...      synchronisation and idle gaps
    python benchmarks/engine_h200.py fault ...     a kernel that faults above width 9
    python benchmarks/engine_h200.py load ...      total throughput by concurrency
    python benchmarks/engine_h200.py logits ...    a captured round's logits against an eager one's, bit for bit
    python benchmarks/engine_h200.py kernels ...   where the time of a round goes, kernel by kernel
    python benchmarks/engine_h200.py window ...    a draft window at 7.5k tokens of context
    python benchmarks/engine_h200.py shape      a step and rounds of Qwen3-8B and -4B shapes, random weights

Each piece prints a table and writes JSON with what produced it.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from engine_load import load
from engine_logits import logits
from prompt_files import read_prompts

from ddtree import Engine, SamplingParams, Speculation
from ddtree.engine.prefill import PrefillKind
from ddtree.engine.state import SamplingFlags
from ddtree.program import commit
from ddtree.train.data_facts import file_sha256

ROOT = Path(__file__).resolve().parents[1]


def pair(args: argparse.Namespace) -> dict[str, Any]:
    """Every way over the same prompts in turn; the median over prompts, after one untimed round of all."""
    engine = Engine.load(args.model, args.draft, dtype=args.dtype, max_model_len=2048, max_batch=4, graphs="on")
    ways = {"ar": Speculation("ar"), "chain": Speculation("chain")}
    ways |= {"tree auto": Speculation("tree")} | {f"tree {b}": Speculation("tree", b) for b in args.budgets}
    prompts = read_prompts(args.prompts, ("gsm8k_test100", "humaneval"), args.count)
    params = SamplingParams(max_new_tokens=256)
    rows: dict[str, dict[str, list[float]]] = {
        name: {"tok_s": [], "ms": [], "tokens": [], "rounds": []} for name in ways
    }
    texts: dict[str, list[list[int]]] = {name: [] for name in ways}
    for speculation in ways.values():
        engine.generate(prompts[:1], SamplingParams(max_new_tokens=32), speculation=speculation)
    for turn, prompt in enumerate(prompts):
        order = list(ways) if turn % 2 else list(ways)[::-1]
        for name in order:
            done = engine.generate([prompt], params, speculation=ways[name])[0]
            row = rows[name]
            row["tok_s"].append(done.stats.decode_tok_s)
            row["ms"].append(statistics.median(done.stats.round_ms))
            row["tokens"].append(sum(done.stats.accepted_lengths))
            row["rounds"].append(done.stats.rounds)
            texts[name].append(done.token_ids)
    table = []
    for name, row in rows.items():
        seconds = sum(t / s for t, s in zip(row["tokens"], row["tok_s"], strict=True))
        table.append({
            "way": name, "prompts": len(prompts), "tok_s": round(statistics.median(row["tok_s"]), 1),
            "tok_s_mean": round(sum(row["tokens"]) / seconds, 1),
            "round_ms": round(statistics.median(row["ms"]), 4),
            "tau": round(sum(row["tokens"]) / sum(row["rounds"]), 3),
            "same_text_as_ar": sum(a == b for a, b in zip(texts[name], texts["ar"], strict=True)),
            "tok_s_by_prompt": [round(v) for v in row["tok_s"]],
        })  # fmt: skip
        print({k: v for k, v in table[-1].items() if k != "tok_s_by_prompt"}, flush=True)
    costs = {
        str(budget): round(ms, 4) for (batch, budget), ms in engine._scheduler.round_costs_ms().items() if batch == 1
    }
    return {"facts": engine.facts(), "auto_costs_ms": costs, "rows": table, "turns": turns(engine, args)}


def turns(engine: Engine, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What `auto` takes while the text turns from code to chat and back."""
    code, chat = (read_prompts(args.prompts, (name,), 6) for name in ("humaneval", "mt_bench"))
    rows = []
    for kind, prompt in [
        *(("code", p) for p in code[:3]),
        *(("chat", p) for p in chat),
        *(("code", p) for p in code[3:]),
    ]:
        stats = engine.generate([prompt], SamplingParams(max_new_tokens=256))[0].stats
        rows.append({
            "text": kind, "budgets": [stats.round_budgets[i] for i in range(0, stats.rounds, 8)],
            "tau": round(stats.tau, 2), "tok_s": round(stats.decode_tok_s),
        })  # fmt: skip
    print([(row["text"], round(statistics.mean(row["budgets"])), row["tau"]) for row in rows], flush=True)
    return rows


def window(args: argparse.Namespace) -> dict[str, Any]:
    """A draft window at 7.5k tokens of context: acceptance, time of a round, and the drafter's cache."""
    texts = [m["content"] for p in read_prompts(args.prompts, ("gsm8k_test100", "humaneval"), 40) for m in p]
    rows = []
    for tokens in (None, 512, 2048):
        engine = Engine.load(
            args.model, args.draft, dtype=args.dtype, max_model_len=8192, max_batch=1, graphs="on", draft_window=tokens
        )
        ids = engine.tokenizer.encode("\n\n".join(texts))[:7400]
        prompts = [ids + engine.tokenizer.encode(f"\n\n{text}\n") for text in texts[:8]]
        for speculation in (Speculation("chain"), Speculation("tree", 16), Speculation("tree", 64)):
            params = SamplingParams(max_new_tokens=128, ignore_eos=True)
            engine.generate(prompts[:1], params, speculation=speculation)
            done = [engine.generate([p], params, speculation=speculation)[0].stats for p in prompts]
            rows.append({
                "window": tokens, "mode": speculation.mode, "budget": speculation.budget,
                "tau": round(sum(sum(s.accepted_lengths) for s in done) / sum(s.rounds for s in done), 3),
                "round_ms": round(statistics.median(ms for s in done for ms in s.round_ms), 4),
                "drafter_cache_bytes": engine.state.drafter_cache.nbytes,
            })  # fmt: skip
            print(rows[-1], flush=True)
    return {"rows": rows}


def gate(args: argparse.Namespace) -> dict[str, Any]:
    """The near-tie gate: every token of trees against the target decoding one token a step."""
    engine = Engine.load(args.model, args.draft, dtype=args.dtype, max_model_len=2048, max_batch=8, graphs="on")
    prompts = read_prompts(args.prompts, ("gsm8k_test100", "humaneval"), args.count)
    params = SamplingParams(max_new_tokens=256)
    rows = []
    for speculation in (Speculation("tree", 64), Speculation("tree")):
        done = engine.generate(prompts, params, speculation=speculation)
        reports = [engine.check_lossless(p, c.token_ids) for p, c in zip(prompts, done, strict=True)]
        ties = [tie for report in reports for tie in report.differing]
        steps = [0.5, 1, 2, 3, 4, float("inf")]
        rows.append({
            "budget": speculation.budget or "auto", "tokens": sum(r.tokens for r in reports),
            "faults": sum(r.faults for r in reports), "near_ties": sum(len(r.near_ties) for r in reports),
            "histogram_bf16_steps_up_to": {str(step): sum(tie.bf16_steps <= step for tie in ties) for step in steps},
            "worst_steps": max((tie.bf16_steps for tie in ties), default=0.0),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return {"facts": engine.facts(), "rows": rows}


def exact(args: argparse.Namespace) -> dict[str, Any]:
    """Exact mode: tokens that differ from its plain decoding, alone and in ragged batches, and its cost."""
    settings = {"dtype": args.dtype, "max_model_len": 2048, "max_batch": 8, "graphs": "on"}
    engine = Engine.load(args.model, args.draft, exact=True, **settings)
    prompts = read_prompts(args.prompts, ("gsm8k_test100", "humaneval"), max(args.count // 2, 1))
    greedy = [SamplingParams(max_new_tokens=256)] * len(prompts)
    sampled = [SamplingParams(max_new_tokens=256, temperature=0.8, seed=i) for i in range(len(prompts))]
    filtered = [SamplingParams(max_new_tokens=256, temperature=1.0, top_p=0.9, seed=i) for i in range(len(prompts))]
    ways = {"ar": Speculation("ar"), "chain": Speculation("chain"), "tree auto": Speculation("tree")}
    ways |= {f"tree {b}": Speculation("tree", b) for b in (8, 64, 128)}
    rows: list[dict[str, Any]] = []
    for kind, each in (("greedy", greedy), ("sampled", sampled), ("top-p", filtered)):
        plain = [
            engine.generate([p], s, speculation=ways["ar"])[0].token_ids for p, s in zip(prompts, each, strict=True)
        ]
        for name in ways if kind == "greedy" else ("chain", "tree 64", "tree auto"):
            for batch in (1, 4, 8) if kind == "greedy" else (4,):
                done: list[Any] = []
                for at in range(0, len(prompts), batch):
                    some = slice(at, at + batch)
                    done += engine.generate(prompts[some], each[some], speculation=ways[name])
                differing = 0
                for got, want in zip(done, plain, strict=True):
                    differing += sum(a != b for a, b in zip(got.token_ids, want, strict=False))
                    differing += abs(len(got.token_ids) - len(want))
                rounds = sum(c.stats.rounds for c in done)
                rows.append({
                    "kind": kind, "way": name, "batch": batch, "prompts": len(prompts),
                    "tokens": sum(map(len, plain)), "differing_tokens": differing,
                    "tau": round(sum(sum(c.stats.accepted_lengths) for c in done) / rounds, 3),
                })  # fmt: skip
                print(rows[-1], flush=True)
    facts = engine.facts()

    engines = {"exact": engine, "fast": Engine.load(args.model, args.draft, memory_fraction=0.5, **settings)}
    times: dict[tuple[str, str], list[float]] = {}
    for turn, prompt in enumerate([prompts[0], *prompts]):
        for kind in list(engines) if turn % 2 else list(engines)[::-1]:
            for name in ("ar", "tree 64"):
                stats = engines[kind].generate([prompt], greedy[0], speculation=ways[name])[0].stats
                if turn:  # the first is to warm up
                    times.setdefault((kind, name), []).append(statistics.median(stats.round_ms))
    for name in ("ar", "tree 64"):
        ms = {kind: statistics.median(times[kind, name]) for kind in engines}
        rows.append({
            "way": name, "batch": 1, "n": len(prompts), "exact_round_ms": round(ms["exact"], 4),
            "fast_round_ms": round(ms["fast"], 4), "exact_to_fast": round(ms["exact"] / ms["fast"], 3),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return {"facts": facts, "rows": rows}


def host(args: argparse.Namespace) -> dict[str, Any]:
    """The host in the way? Rounds under torch's synchronisation alarm, and the idle gaps between replays."""
    from torch.profiler import ProfilerActivity, profile

    engine = Engine.load(args.model, args.draft, dtype=args.dtype, max_model_len=2048, max_batch=1, graphs="on")
    prompt = read_prompts(args.prompts, ("gsm8k_test100",), 1)[0]
    params = SamplingParams(max_new_tokens=1500, ignore_eos=True)
    rows = []
    for speculation in (Speculation("ar"), Speculation("tree", 64)):
        engine.generate([prompt], params, speculation=speculation)
        stream = engine.stream(prompt, params, speculation=speculation)
        next(stream)
        torch.cuda.set_sync_debug_mode("error")
        rounds = sum(1 for _, event in zip(range(200), stream, strict=False) if event.token_ids)
        torch.cuda.set_sync_debug_mode("default")
        stream.close()
        for _ in range(2):  # the first to start the profiler, which holds up the host
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                stream = engine.stream(prompt, params, speculation=speculation)
                for _ in zip(range(150), stream, strict=False):
                    pass
                stream.close()
                torch.cuda.synchronize()
        kernels = sorted(
            (e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA),
            key=lambda e: e.time_range.start,
        )
        copies = [i for i, e in enumerate(kernels) if e.name == "hand_over"]
        gaps = [kernels[i + 1].time_range.start - kernels[i].time_range.end for i in copies if i + 1 < len(kernels)]
        rows.append({
            "mode": speculation.mode, "rounds_without_synchronisation": rounds, "replays": engine._runner.replays,
            "gap_us_median": round(statistics.median(gaps), 2),
            "gap_us_p90": round(statistics.quantiles(gaps, n=10)[8], 2),
            "kernels_a_round": round(len(kernels) / max(len(copies), 1), 1),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return {"rows": rows}


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    """GPU time of a round by kernel, for rounds of a few batch sizes and budgets."""
    from torch.profiler import ProfilerActivity, profile

    engine = Engine.load(args.model, args.draft, dtype=args.dtype, max_model_len=1024, max_batch=64, graphs="on")
    prompts = read_prompts(args.prompts, ("gsm8k_test100", "humaneval"), 32)
    rows = []
    for batch, budget in ((1, 0), (1, 15), (1, 31), (1, 63), (16, 15), (64, 7)):
        speculation = Speculation("tree", budget) if budget else Speculation("ar")
        params = SamplingParams(max_new_tokens=400, ignore_eos=True)
        asked = [engine.submit(prompts[i % len(prompts)], params, speculation=speculation) for i in range(batch)]
        while not all(sequence.output for sequence in asked):
            engine.step()
        engine.step()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(20):
                engine.step()
            torch.cuda.synchronize()
        for sequence in asked:
            engine.cancel(sequence)
        spans = sorted(
            (e.time_range.start, e.time_range.end)
            for e in trace.events()
            if e.device_type == torch.autograd.DeviceType.CUDA
        )
        by_name: Counter[str] = Counter()
        launches: Counter[str] = Counter()
        for event in trace.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                by_name[event.name[:60]] += event.time_range.elapsed_us()
                launches[event.name[:60]] += 1
        rows.append({
            "batch": batch, "budget": budget, "round_us": round((spans[-1][1] - spans[0][0]) / 20),
            "busy_us": round(by_name.total() / 20),
            "kernels": [
                {"name": name, "us_a_round": round(us / 20, 1), "launches": round(launches[name] / 20, 1)}
                for name, us in by_name.most_common(16)
            ],
        })  # fmt: skip
        print({k: v for k, v in rows[-1].items() if k != "kernels"}, flush=True)
        for kernel in rows[-1]["kernels"]:
            print(f"  {kernel['us_a_round']:8.1f} us {kernel['launches']:6.1f} x {kernel['name']}", flush=True)
    return {"rows": rows, "prefills": prefills(engine)}


def prefills(engine: Engine) -> list[dict[str, float]]:
    """Time of a prefill by prompts and rows, launched one after the other."""
    runner, spare, rows = engine._runner, engine.state.spare_slot, []
    kind = PrefillKind(is_last=True, drafts=True, flags=SamplingFlags())
    for batch in (1, 2, 4):
        for length in (32, 64, 128, 256):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            chunks = [[1] * length] * batch
            runner.prefill([spare] * batch, chunks, kind, 0)  # captures
            begin.record()
            for _ in range(10):
                runner.prefill([spare] * batch, chunks, kind, 0)
            end.record()
            end.synchronize()
            rows.append({"prompts": batch, "rows": length, "ms": round(begin.elapsed_time(end) / 10, 4)})
            print(rows[-1], flush=True)
    return rows


def fault(args: argparse.Namespace) -> dict[str, Any]:
    """A kernel made to fault above width 9: what the probe finds, and that the engine serves within it and says so."""
    from ddtree.engine.graph_probe import find_limit
    from ddtree.engine.graph_runner import GraphRunner

    engine = Engine.load(args.model, args.draft, dtype=args.dtype, max_model_len=1024, max_batch=1, graphs="on")
    began = time.perf_counter()
    limit = find_limit(
        engine.target.config, engine.drafter.config, engine.target.dtype, 1024, lambda stage, fraction: None,
        fault_above=9,
    )  # fmt: skip
    seconds = round(time.perf_counter() - began, 1)
    engine._runner = engine._scheduler._runner = GraphRunner(engine.state, engine.target, engine.drafter, (1,), limit)
    prompt = read_prompts(args.prompts, ("gsm8k_test100",), 1)[0]
    stats = engine.generate([prompt], SamplingParams(max_new_tokens=64), speculation=Speculation("tree", 64))[0].stats
    rows = [{
        "limit": limit.budget, "reason": limit.reason, "probe_seconds": seconds, "served_budget": stats.budget,
        "notes": stats.notes, "tau": round(stats.tau, 2),
    }]  # fmt: skip
    print(rows[0], flush=True)
    return {"rows": rows}


def shape(args: argparse.Namespace) -> dict[str, Any]:
    """Time of a step and of a round for a published shape at 2k context; acceptance is SIMULATED."""
    from shapes import dummy_engine, params

    if args.tiles:
        from wide_h200 import use_tuned

        use_tuned(args.tiles)
    bytes_per_s = 4.26e12
    rows = []
    for name in args.shapes:
        engine = dummy_engine(name, accepted=7)
        weights = sum(t.nbytes for layer in engine.target.layers for t in vars(layer).values() if t is not None)
        weights += engine.target.head.nbytes
        draft = sum(t.nbytes for layer in engine.drafter.layers for t in vars(layer).values() if t is not None)
        draft += engine.target.head.nbytes + engine.drafter.fuse.nbytes
        prompt = [(7 * i) % 1000 + 5 for i in range(2048)]
        for speculation in (
            Speculation("ar"),
            Speculation("chain"),
            *(Speculation("tree", b) for b in (15, 16, 63, 64, 127, 128)),
        ):
            engine.generate([prompt], params(64), speculation=speculation)
            stats = engine.generate([prompt], params(400), speculation=speculation)[0].stats
            ms = statistics.median(stats.round_ms[5:])
            bound = 1e3 * (weights + (draft if speculation.mode != "ar" else 0)) / bytes_per_s
            rows.append({
                "shape": name, "mode": speculation.mode, "budget": speculation.budget, "round_ms": round(ms, 3),
                "bound_ms": round(bound, 3), "fraction_of_bound": round(bound / ms, 3),
                "tau_simulated": round(stats.tau, 2),
                "gb_s": round((weights + (draft if speculation.mode != "ar" else 0)) / ms / 1e6, 1),
            })  # fmt: skip
            print(rows[-1], flush=True)
        del engine
        torch.cuda.empty_cache()
    return {"rows": rows}


PIECES = {piece.__name__: piece for piece in (pair, gate, exact, host, fault, load, logits, kernels, window, shape)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--count", type=int, default=20, help="prompts of each set")
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 15, 16, 31, 32, 63, 64, 127, 128])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests-per-place", type=int, default=8, help="of load")
    parser.add_argument("--shapes", nargs="+", default=["Qwen3-8B", "Qwen3-4B"])
    parser.add_argument("--tiles", type=Path, help="of shape: what `wide_h200.py tune` wrote, in place of the table")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if args.tiles and args.piece != "shape":
        parser.error("--tiles is of the piece shape alone: leave it out")
    began = time.time()
    result = {
        "command": f"python benchmarks/engine_h200.py {args.piece}",
        "options": {k: v for k, v in vars(args).items() if not isinstance(v, Path)} | {"tuned_tiles": bool(args.tiles)},
        "commit": commit(),
        "drafter_sha256": file_sha256(args.draft / "model.safetensors") if args.draft else None,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        **PIECES[args.piece](args),
    }
    for path in ("model", "draft"):
        result.get("facts", {}).pop(path, None)  # folders of the machine it ran on
    result["seconds"] = round(time.time() - began, 1)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"engine_{args.piece}_{args.dtype}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
