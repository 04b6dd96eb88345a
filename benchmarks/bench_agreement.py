"""The same load on the same server, measured by `ddtree bench` and by another tool, in turns.

    python benchmarks/bench_agreement.py --base-url http://127.0.0.1:8000 --peer guidellm --guidellm VENV/bin/guidellm \
        --tokenizer DIR --prompts prompts.jsonl --runs 10 --out benchmarks/results/bench_agreement.json
    python benchmarks/bench_agreement.py --base-url http://127.0.0.1:30000 --peer sglang --peer-pythonpath SITE ...

guidellm lives in an environment of its own; SGLang's client (`sglang.bench_serving`) in this one, or in a folder that
comes first on its path. Each tool's numbers are its own: ours from the rows, a peer's from its JSON. Start the server
with --no-prefix-cache, or warm: the prompts are the same in every run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ddtree.bench.plan import Load, Matrix
from ddtree.bench.provenance import PACKAGES, commit, gpus, host, versions
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


def by_sglang(arguments: argparse.Namespace) -> dict[str, float]:
    rows = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "prompts.jsonl", Path(folder) / "out.jsonl"
        common = {"stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True}
        asked = [{"messages": [{"role": "user", "content": row["turns"][0]}]} | common for row in rows]
        data.write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"]
        command += ["--base-url", arguments.base_url, "--model", arguments.model]
        command += ["--tokenizer", str(arguments.tokenizer), "--dataset-name", "openai", "--dataset-path", str(data)]
        command += ["--sharegpt-output-len", str(arguments.max_tokens), "--num-prompts", str(len(rows))]
        command += ["--max-concurrency", str(arguments.concurrency), "--warmup-requests", "0"]
        command += ["--output-file", str(out), "--output-details", "--disable-tqdm"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if arguments.peer_pythonpath:
            environment["PYTHONPATH"] = arguments.peer_pythonpath
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0 and out.exists(), done.stderr[-2000:]
        found = json.loads(out.read_text(encoding="utf-8").splitlines()[-1])
    assert found["completed"] == len(rows), found["errors"]
    texts = [(tokens - 1) / sum(gaps) for tokens, gaps in zip(found["output_lens"], found["itls"], strict=True) if gaps]
    return {
        "ttft_ms": found["median_ttft_ms"],
        "user_tok_s": statistics.median(texts),
        "total_tok_s": found["output_throughput"],
    }


def told(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else {"median": estimate.value, "low": estimate.low, "high": estimate.high}


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    ours, theirs = runs
    found: dict[str, Any] = {}
    for quantity in QUANTITIES:
        own, others = ([[run[quantity]] for run in runs[tool]] for tool in (ours, theirs))
        mine, other = median_of_groups(own), median_of_groups(others)
        assert mine and other
        found[quantity] = {
            ours: told(mine),
            theirs: told(other),
            "ratio": told(ratio_of_medians(own, others)),
            "intervals_overlap": mine.low <= other.high and other.low <= mine.high,
        }
    return found


def peer_version(arguments: argparse.Namespace) -> str:
    if arguments.peer == "guidellm":
        asked = [str(arguments.guidellm), "--version"]
    else:
        asked = [sys.executable, "-c", "from importlib.metadata import version; print(version('sglang'))"]
    path = {"PYTHONPATH": arguments.peer_pythonpath} if arguments.peer_pythonpath else {}
    told = subprocess.run(asked, capture_output=True, text=True, check=True, env=os.environ | path).stdout
    return told.strip().split()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--peer", choices=["guidellm", "sglang"], required=True)
    parser.add_argument("--guidellm", type=Path, help="its program")
    parser.add_argument("--peer-pythonpath", metavar="DIR[:DIR]", help="where the peer is imported from")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if (arguments.peer == "guidellm") == (arguments.guidellm is None):
        parser.error("--guidellm goes with --peer guidellm, and only with it")
    name, by_peer = {
        "guidellm": ("guidellm", by_guidellm),
        "sglang": ("sglang.bench_serving", by_sglang),
    }[arguments.peer]
    version = peer_version(arguments)
    tools = {"ddtree bench": by_ddtree, name: by_peer}
    for tool in tools.values():  # warm-up
        tool(arguments)
    runs: dict[str, list[dict[str, float]]] = {tool: [] for tool in tools}
    for number in range(arguments.runs):
        for tool in list(tools) if number % 2 == 0 else reversed(list(tools)):
            runs[tool].append(tools[tool](arguments))
            print(number, tool, {key: round(value, 2) for key, value in runs[tool][-1].items()}, flush=True)
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
            "versions": versions(PACKAGES) | {name: version},
            "commit": commit(),
            "host": host(),
            "gpus": gpus(),
        }
        arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
