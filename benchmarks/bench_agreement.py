"""The same load on the same server, measured by `ddtree bench` and by guidellm, in turns.

    python benchmarks/bench_agreement.py --base-url http://127.0.0.1:8000 --guidellm VENV/bin/guidellm \
        --tokenizer DIR --prompts prompts.jsonl --runs 10 --out benchmarks/results/bench_agreement.json

guidellm lives in an environment of its own. It asks for `stream_options.continuous_usage_stats`, an extension of vLLM
that `ddtree serve` refuses: take that line out of its `request_handlers.py` first. Each tool's numbers are its own:
ours from the rows, guidellm's from its JSON. Start the server with --no-prefix-cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ddtree.bench.plan import Load, Matrix
from ddtree.bench.provenance import commit, host, versions
from ddtree.bench.result_folder import read_requests, read_units
from ddtree.bench.run import RunOptions, run_bench
from ddtree.bench.statistics import Estimate, median_of_groups, ratio_of_medians
from ddtree.bench.throughput import decode_tok_s
from ddtree.bench.workload import read_workload

QUANTITIES = ("ttft_ms", "user_tok_s", "total_tok_s")


def by_ddtree(arguments: argparse.Namespace) -> dict[str, float]:
    workload = read_workload(str(arguments.prompts))
    with tempfile.TemporaryDirectory() as folder:
        options = RunOptions(
            url=arguments.base_url,
            folder=Path(folder) / "run",
            matrix=Matrix(workloads=(workload,), concurrencies=(arguments.concurrency,)),
            load=Load(
                repetitions=1,
                requests=len(workload.problems),
                max_tokens=arguments.max_tokens,
                ignore_eos=True,
                warm_up_requests=0,
            ),
        )
        run_bench(options)
        (unit,), rows = read_units(options.folder), read_requests(options.folder)
    assert not unit.errors, unit.errors
    speeds = [speed for row in rows if (speed := decode_tok_s(row)) is not None]
    return {
        "ttft_ms": statistics.median(row.ttft_ms for row in rows if row.ttft_ms is not None),
        "user_tok_s": statistics.median(speeds),
        "total_tok_s": unit.whole_tok_s,
    }


def by_guidellm(arguments: argparse.Namespace) -> dict[str, float]:
    rows = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "prompts.jsonl", Path(folder) / "out.json"
        asked = [{"prompt": row["turns"][0], "output_tokens_count": arguments.max_tokens} for row in rows]
        data.write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
        backend = {
            "kind": "openai_http",
            "target": arguments.base_url,
            "model": arguments.model,
            "request_format": "/v1/chat/completions",
            "extras": {"body": {"temperature": 0}},
        }
        command = [str(arguments.guidellm), "run", "--backend", json.dumps(backend)]
        command += ["--profile", f"kind=concurrent,streams={arguments.concurrency}"]
        command += ["--constraint", f"kind=max_requests,count={len(rows)}", "--data", f"kind=json_file,path={data}"]
        command += ["--tokenizer", f"kind=hf_auto,model={arguments.tokenizer}", "--disable-console"]
        command += ["--output", f"kind=json,path={out}"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        told = json.loads(out.read_text(encoding="utf-8"))["benchmarks"][0]
    made = told["scheduler_metrics"]["requests_made"]
    assert made["successful"] == len(rows) and not made["errored"], made
    done = told["requests"]["successful"]
    first = min(row["request_start_time"] for row in done)
    last = max(row["request_end_time"] for row in done)
    return {
        "ttft_ms": statistics.median(row["time_to_first_token_ms"] for row in done),
        "user_tok_s": statistics.median(1e3 / row["inter_token_latency_ms"] for row in done),
        "total_tok_s": sum(row["output_tokens"] for row in done) / (last - first),
    }


def told(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else {"median": estimate.value, "low": estimate.low, "high": estimate.high}


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for quantity in QUANTITIES:
        ours, theirs = ([[run[quantity]] for run in runs[tool]] for tool in ("ddtree bench", "guidellm"))
        mine, other = median_of_groups(ours), median_of_groups(theirs)
        assert mine and other
        found[quantity] = {
            "ddtree bench": told(mine),
            "guidellm": told(other),
            "ratio": told(ratio_of_medians(ours, theirs)),
            "intervals_overlap": mine.low <= other.high and other.low <= mine.high,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--guidellm", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    peer = subprocess.run([str(arguments.guidellm), "--version"], capture_output=True, text=True, check=True).stdout
    tools = {"ddtree bench": by_ddtree, "guidellm": by_guidellm}
    by_ddtree(arguments)  # warm-up
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in tools}
    for number in range(arguments.runs):
        for name in list(tools) if number % 2 == 0 else reversed(list(tools)):
            runs[name].append(tools[name](arguments))
            print(number, name, {key: round(value, 2) for key, value in runs[name][-1].items()}, flush=True)
        content = {
            "what": "the same load on the same server by two tools, in turns; medians over runs, 95 % intervals",
            "runs_each": number + 1,
            "load": {
                "prompts": len(arguments.prompts.read_text(encoding="utf-8").splitlines()),
                "concurrency": arguments.concurrency,
                "max_tokens": arguments.max_tokens,
                "ignore_eos": True,
            },
            "compared": compared(runs),
            "raw": runs,
            "versions": versions() | {"guidellm": peer.strip().split()[-1]},
            "commit": commit(),
            "host": host() | {"python": platform.python_version()},
        }
        arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
