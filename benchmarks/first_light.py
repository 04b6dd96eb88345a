"""The claims of the eager engine, measured: equal text, acceptance length, and speed on a CPU.

    python benchmarks/first_light.py equality --prompts DIR     tree = chain = AR, greedy and sampled, in float32
    python benchmarks/first_light.py tau --prompts DIR          acceptance length by budget, in float32
    python benchmarks/first_light.py speed --prompts DIR        AR, chain and trees against transformers, interleaved

`DIR` holds gsm8k_test100.jsonl, humaneval.jsonl and mt_bench.jsonl with a field `turns`. Each command prints a table
and writes its numbers, with what produced them, to benchmarks/results/.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from prompt_files import read_prompts

from ddtree import Engine, SamplingParams, Speculation

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = (8, 16, 32, 64, 128)


def provenance(engine: Engine) -> dict[str, Any]:
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    facts = {k: v for k, v in engine.facts().items() if k not in ("model", "draft")}
    gpu = torch.cuda.get_device_name() if engine.target.device.type == "cuda" else None
    return {
        "command": " ".join(["python", "benchmarks/first_light.py", *sys.argv[1:2]]),
        "commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "cpu": cpu,
        "gpu": gpu,
        "facts": facts,
    }


def equality(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Differing tokens of every mode against AR: 40 prompts greedy, 20 at T = 0.8, alone and in a batch."""
    prompts = [
        p
        for name, n in (("gsm8k_test100", 14), ("humaneval", 13), ("mt_bench", 13))
        for p in read_prompts(args.prompts, (name,), n)
    ]
    rows = []

    def compare(
        what: str, chosen: list[Any], params: list[SamplingParams], speculation: Speculation, batched: bool
    ) -> None:
        expected = [c.token_ids for c in engine.generate(chosen, params, speculation=Speculation("ar"))]
        if batched:
            got = [c.token_ids for c in engine.generate(chosen, params, speculation=speculation)]
        else:
            got = [
                engine.generate([p], s, speculation=speculation)[0].token_ids
                for p, s in zip(chosen, params, strict=True)
            ]
        equal = sum(a == b for a, b in zip(expected, got, strict=True))
        rows.append(
            {
                "what": what,
                "mode": speculation.mode,
                "budget": speculation.budget,
                "batched": batched,
                "prompts": len(chosen),
                "equal": equal,
                "tokens": sum(map(len, expected)),
            }
        )
        print(rows[-1], flush=True)

    greedy = [SamplingParams(max_new_tokens=args.max_new_tokens)] * len(prompts)
    for speculation in (Speculation("chain"), Speculation("tree", 32)):
        compare("greedy", prompts, greedy, speculation, batched=True)
    compare("greedy", prompts[::4], greedy[::4], Speculation("tree", 64), batched=False)
    sampled = [SamplingParams(max_new_tokens=args.max_new_tokens, temperature=0.8, seed=i) for i in range(20)]
    some = prompts[::2]
    for batched in (True, False):
        for speculation in (Speculation("chain"), *(Speculation("tree", b) for b in (4, 32, 128))):
            compare("T=0.8", some, sampled, speculation, batched)
    return {"rows": rows}


def tau(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Committed tokens per round on the first 10 prompts of each set; the last, cut round counts what it gave."""
    params = SamplingParams(max_new_tokens=256)
    rows = []
    for name in ("gsm8k_test100", "humaneval", "mt_bench"):
        prompts = read_prompts(args.prompts, (name,), 10)
        for speculation in (Speculation("chain"), *(Speculation("tree", b) for b in BUDGETS)):
            done = engine.generate(prompts, params, speculation=speculation)
            tokens, rounds = sum(sum(c.stats.accepted_lengths) for c in done), sum(c.stats.rounds for c in done)
            rows.append(
                {
                    "set": name,
                    "mode": speculation.mode,
                    "budget": speculation.budget,
                    "tokens": tokens,
                    "rounds": rounds,
                    "tau": round(tokens / rounds, 3),
                    "new_tokens_a_round": round((tokens + len(done)) / rounds, 3),
                }
            )
            print(rows[-1], flush=True)
    return {"rows": rows}


def speed(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Decode tokens a second at batch 1, all ways in turn over the same prompts; medians over repetitions."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=engine.target.dtype)
    prompts = read_prompts(args.prompts, ("gsm8k_test100", "humaneval"), args.repeats // 2)
    ways = {"ar": Speculation("ar"), "chain": Speculation("chain")} | {
        f"tree {b}": Speculation("tree", b) for b in (8, 16, 32, 64)
    }
    seen: dict[str, list[float]] = {name: [] for name in ("transformers", *ways)}
    taus: dict[str, list[float]] = {name: [] for name in ways}

    def run_transformers(ids: torch.Tensor, count: int) -> float:
        def timed(n: int) -> float:
            began = time.perf_counter()
            reference.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False)
            return time.perf_counter() - began

        first = timed(1)
        return (count - 1) / (timed(count) - first)

    params = SamplingParams(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    for turn, prompt in enumerate(prompts):
        names = list(seen) if turn % 2 else list(seen)[::-1]
        for name in names:
            if name == "transformers":
                ids = torch.tensor([engine.tokenizer.encode_chat(prompt)])
                seen[name].append(run_transformers(ids, args.max_new_tokens))
            else:
                stats = engine.generate([prompt], params, speculation=ways[name])[0].stats
                seen[name].append(stats.decode_tok_s)
                taus[name].append(stats.tau)
    rows = []
    for name, values in seen.items():
        ratios = [v / a for v, a in zip(values, seen["ar"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "way": name,
                "n": len(values),
                "tok_s_median": round(statistics.median(values), 2),
                "against_ar_median": round(statistics.median(ratios), 3),
                "against_ar_quartiles": [round(low, 3), round(high, 3)],
                "tau_median": round(statistics.median(taus[name]), 2) if name in taus else None,
            }
        )
        print(rows[-1], flush=True)
    return {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("equality", "tau", "speed"))
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="target folder; the demo's own by default")
    parser.add_argument("--draft", type=Path, help="drafter folder; the demo's own by default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if args.model is None:
        from ddtree.demo.target import target_folder

        args.model = target_folder()
    if args.draft is None:
        from ddtree.demo import drafter_folder

        args.draft = drafter_folder()
    engine = Engine.load(args.model, args.draft, device=args.device, dtype=args.dtype, max_model_len=1024, max_batch=10)
    result = {**provenance(engine), "max_new_tokens": args.max_new_tokens, **globals()[args.what](engine, args)}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"first_light_{args.what}_{engine.target.device.type}_{args.dtype}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path.name)


if __name__ == "__main__":
    main()
