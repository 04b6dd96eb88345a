"""DDTREE in SGLang on one GPU: kernels, then many servers side by side, texts against plain decoding, then speeds.

    python benchmarks/sglang_h200/run.py --kit DIR --target DIR --drafter DIR --prompts DIR --out DIR [--only NAME ...]

Servers start together, since most of a start is imports; speeds are taken one server at a time, the others idle.
What fails prints its traceback and the rest goes on; every server is ended, and all logs end in ``--out``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from kit import ROOT, environment, install_kit, plugin_path
from servers import Answer, Server, figures

COMMON = [
    "--sampling-backend", "pytorch", "--cuda-graph-max-bs", "16", "--cuda-graph-backend-prefill=disabled",
    "--mem-fraction-static", "0.6", "--max-total-tokens", "65536", "--context-length", "4096", "--skip-server-warmup",
    "--enable-metrics", "--max-running-requests", "16", "--log-level", "info", "--random-seed", "1", "--sleep-on-idle",
]  # fmt: skip

WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "ar": ("--attention-backend fa3", {}),
    "dflash": ("--attention-backend fa3 SPEC DFLASH --speculative-num-draft-tokens 16", {}),
    "tree16": ("--attention-backend fa3 SPEC DDTREE --speculative-ddtree-budget 16", {}),
    "tree32": ("--attention-backend fa3 SPEC DDTREE --speculative-ddtree-budget 32", {}),
    "tree64": ("--attention-backend fa3 SPEC DDTREE --speculative-ddtree-budget 64", {}),
    "tree8": ("--attention-backend fa3 SPEC DDTREE --speculative-ddtree-budget 8", {}),
    "tree32-split": (
        "--attention-backend fa3 SPEC DDTREE --speculative-ddtree-budget 32",
        {"DDTREE_SGLANG_CONFIG": '{"fold_tail": false}'},
    ),
    "chain": ("--attention-backend fa3 SPEC DDTREE --speculative-ddtree-budget 15 --speculative-ddtree-topk-cap 1", {}),
    "triton16": ("--attention-backend triton SPEC DDTREE --speculative-ddtree-budget 16", {}),
    "triton16-page64": ("--attention-backend triton --page-size 64 SPEC DDTREE --speculative-ddtree-budget 16", {}),
    "fa3-page64": ("--attention-backend fa3 --page-size 64 SPEC DDTREE --speculative-ddtree-budget 16", {}),
    "flashinfer16": ("--attention-backend flashinfer SPEC DDTREE --speculative-ddtree-budget 16", {}),
    "eager16": (
        "--attention-backend fa3 --disable-cuda-graph SPEC DDTREE --speculative-ddtree-budget 16",
        {"CUDA_LAUNCH_BLOCKING": "1"},
    ),
    "sync16": (
        "--attention-backend fa3 --disable-overlap-schedule SPEC DDTREE --speculative-ddtree-budget 16", {},
    ),
    "window": (
        "--attention-backend fa3 --speculative-draft-window-size 128 SPEC DDTREE --speculative-ddtree-budget 16", {},
    ),
    "ar-triton": ("--attention-backend triton", {}),
    "ar-flashinfer": ("--attention-backend flashinfer", {}),
}  # fmt: skip
SPEEDS = ("ar", "dflash", "tree8", "tree16", "tree32", "tree64", "tree32-split")
AGAINST = {
    "triton16": "ar-triton", "triton16-page64": "ar-triton", "flashinfer16": "ar-flashinfer", "chain": "dflash",
}  # fmt: skip
PROFILED = ("dflash", "tree32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("kit", "target", "drafter", "prompts", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--site", type=Path, default=Path("site"), help="where the kit is unpacked to")
    parser.add_argument("--only", nargs="*", default=list(WAYS), help="ways to start")
    parser.add_argument("--count", type=int, default=20, help="prompts, half of them maths, half code")
    parser.add_argument("--seconds", type=float, default=330, help="after that no new piece begins")
    parser.add_argument("--start-seconds", type=float, default=170, help="to wait for servers at most")
    parser.add_argument("--skip-kernels", action="store_true")
    args = parser.parse_args()
    begun = time.time()
    args.target, args.drafter = args.target.resolve(), args.drafter.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    site = args.site.resolve()
    install_kit(args.kit, site)
    plugin = plugin_path(site.with_name("plugin"))
    env = environment(site, plugin)
    print(f"kit ready after {time.time() - begun:.0f} s", flush=True)

    logs = site.with_name("logs")
    logs.mkdir(exist_ok=True)
    servers = [make_server(name, i, args) for i, name in enumerate(args.only)]
    results: dict[str, Any] = {"command": sys.argv, "ways": {}}
    try:
        for server in servers:
            if server.name in PROFILED:
                server.extra_environment = server.extra_environment | {"STACK_SAMPLES": str(logs / server.name)}
            server.start(env, logs)
            time.sleep(0.3)
        if not args.skip_kernels:
            check_kernels(env, logs, args.out)
        prompts = read_prompts(args, env)
        serve_all(servers, prompts, results, begun, args)
    except Exception:
        traceback.print_exc()
    finally:
        for server in servers:
            server.stop()
        (args.out / "results.json").write_text(json.dumps(results, indent=1))
        with tarfile.open(args.out / "logs.tar.gz", "w:gz") as archive:
            archive.add(logs, "logs")
        print(f"all ended after {time.time() - begun:.0f} s", flush=True)


def make_server(name: str, index: int, args: argparse.Namespace) -> Server:
    line, extra = WAYS[name]
    spec = f"--speculative-draft-model-path {args.drafter} --speculative-algorithm"
    arguments = ["--model-path", str(args.target), *COMMON, *line.replace("SPEC", spec).split()]
    return Server(name, arguments, 30000 + 200 * index, extra)


def check_kernels(env: dict[str, str], logs: Path, out: Path) -> None:
    """Our kernels on this GPU, in the kit's environment, without a server."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "tests/sglang/test_round_kernels.py",
    ]
    command += ["tests/sglang/test_head.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=env | {"PYTHONPATH": f"{env['PYTHONPATH']}:{ROOT / 'tests'}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    (logs / "kernels.txt").write_text(done.stdout + done.stderr)
    print(
        "kernels:", "\n".join((done.stdout + done.stderr).strip().splitlines()[-(3 if done.returncode == 0 else 60) :])
    )


def read_prompts(args: argparse.Namespace, env: dict[str, str]) -> list[list[int]]:
    """Token ids of chat prompts, made in the kit's environment."""
    code = (
        "import json, sys; from transformers import AutoTokenizer; t = AutoTokenizer.from_pretrained(sys.argv[1]);"
        "print(json.dumps([t.apply_chat_template([{'role': 'user', 'content': q}], add_generation_prompt=True,"
        " tokenize=True, return_dict=False) for q in json.load(sys.stdin)]))"
    )
    questions = []
    for name in ("gsm8k_test100", "humaneval"):
        lines = (args.prompts / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[: args.count // 2]
        questions += [json.loads(line)["turns"][0] for line in lines]
    done = subprocess.run(
        [sys.executable, "-c", code, str(args.target)], input=json.dumps(questions), env=env,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    ids: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return ids


def serve_all(
    servers: list[Server], prompts: list[list[int]], results: dict[str, Any], begun: float, args: argparse.Namespace
) -> None:
    """Texts of every server as it comes up, then speeds."""
    waiting, ready, texts = list(servers), [], {}
    started = time.time()
    while waiting and time.time() - started < args.start_seconds:
        for server in list(waiting):
            if not server.alive():
                waiting.remove(server)
                print(f"\n=== {server.name}: ended at start\n{server.tail(60)}\n", flush=True)
            elif server.is_ready():
                waiting.remove(server)
                server.ready_s = time.time() - started
                print(f"{server.name}: ready after {server.ready_s:.0f} s", flush=True)
                if (answers := guarded(server, lambda s=server: check_texts(s, prompts, results))) is not None:
                    texts[server.name] = answers
                    ready.append(server)
        time.sleep(0.5)
    for server in waiting:
        print(f"\n=== {server.name}: not ready\n{server.tail(25)}\n", flush=True)
    compare_texts(texts, results)
    by_name = {server.name: server for server in ready}
    for name in ("tree16", "tree32-split"):
        if "ar" in by_name and name in by_name:
            guarded(by_name[name], lambda n=name: check_sampling(by_name["ar"], by_name[n], prompts, results))
    for server in ready:
        if server.name not in SPEEDS:
            server.stop()
    for server in sorted(ready, key=lambda s: SPEEDS.index(s.name) if s.name in SPEEDS else 99):
        if server.name in SPEEDS and time.time() - begun < args.seconds:
            guarded(server, lambda s=server: take_speeds(s, prompts, results))
    for path in sorted(servers[0].log.parent.glob("*.[0-9]*")) if servers[0].log else []:
        lines = path.read_text().splitlines()
        print(f"\n--- {path.name}\n" + "\n".join(lines[:55]))


def guarded(server: Server, work: Any) -> Any:
    try:
        return work()
    except Exception as error:
        print(f"\n=== {server.name}: {error!r}\n{server.tail(70)}\n", flush=True)
        return None


def check_texts(server: Server, prompts: list[list[int]], results: dict[str, Any]) -> list[Answer]:
    """Alone, ragged four at a time, and again with warm prefixes."""
    first = server.generate(prompts[0], timeout=100)
    cold, cold_s = server.answer_all(prompts, 4)
    warm, warm_s = server.answer_all(prompts, 4)
    row = results["ways"].setdefault(server.name, {"ready_s": server.ready_s})
    row["cold"], row["warm"] = figures(cold, cold_s), figures(warm, warm_s)
    row["same_warm"] = sum(a.token_ids == b.token_ids for a, b in zip(cold, warm, strict=True))
    row["cached_tokens"] = sum(int(a.meta.get("cached_tokens") or 0) for a in warm)
    row["alone_same"] = first.token_ids == cold[0].token_ids
    row["cuda_graph"] = b"cuda graph: True" in (server.log.read_bytes() if server.log else b"")
    print(f"  {server.name}: {json.dumps(row)}", flush=True)
    if server.name == "tree32":
        told = json.loads(server.get("/server_info"))
        row["server_info"] = {key: value for key, value in told.items() if "speculative" in key and value is not None}
        row["metrics"] = [
            line for line in server.get("/metrics").decode().splitlines() if line.startswith("sglang:spec_")
        ]
        print(f"  {row['server_info']}\n  {row['metrics']}", flush=True)
    return cold


def compare_texts(texts: dict[str, list[Answer]], results: dict[str, Any]) -> None:
    if "ar" not in texts:
        return
    for name, answers in texts.items():
        against = AGAINST.get(name, "ar")
        against = against if against in texts else "ar"
        plain = texts[against]
        splits = []
        for got, want in zip(answers, plain, strict=True):
            pairs = list(zip(got.token_ids, want.token_ids, strict=False))
            split = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            splits.append(split if split is not None or len(got.token_ids) == len(want.token_ids) else len(pairs))
        results["ways"][name]["first_difference"] = splits
        same = sum(split is None for split in splits)
        print(f"{name:16} same as {against} on {same} of {len(splits)}; first differences {splits}", flush=True)


def check_sampling(plain: Server, tree: Server, prompts: list[list[int]], results: dict[str, Any]) -> None:
    """Draws of a few tokens at T > 0 by both ways, compared by a chi-square test of their joint counts."""
    from scipy.stats import chi2_contingency

    cases = {
        "T=1 top_k=4": {"temperature": 1.0, "top_k": 4},
        "T=0.8 top_p=0.8": {"temperature": 0.8, "top_p": 0.8},
        "T=1 top_k=8 top_p=0.95 min_p=0.1": {"temperature": 1.0, "top_k": 8, "top_p": 0.95, "min_p": 0.1},
    }
    for name, sampling in cases.items():
        counts: list[Counter[tuple[int, ...]]] = []
        for server in (plain, tree):
            answers, _ = server.answer_all([prompts[1]] * 480, 16, max_new_tokens=3, **sampling)
            counts.append(Counter(tuple(answer.token_ids) for answer in answers))
        keys = sorted(counts[0] | counts[1], key=lambda key: -(counts[0][key] + counts[1][key]))
        often = [key for key in keys if counts[0][key] + counts[1][key] >= 10]
        table = [[count[key] for key in often] + [sum(count[key] for key in keys[len(often) :])] for count in counts]
        table = [row if sum(r[-1] for r in table) else row[:-1] for row in table]
        p = float(chi2_contingency(table).pvalue) if len(table[0]) > 1 else float("nan")
        results["ways"][tree.name].setdefault("sampling", {})[name] = {"p": p, "table": table}
        print(f"  {tree.name}: {name}: chi-square p = {p:.3f} over {len(table[0])} outcomes", flush=True)


def take_speeds(server: Server, prompts: list[list[int]], results: dict[str, Any]) -> None:
    row = results["ways"][server.name]
    for concurrency in (1, 4, 16):
        batch = prompts if concurrency < 16 else prompts * 2
        row[f"c{concurrency}"] = figures(*server.answer_all(batch, concurrency))
    print(f"{server.name:8}" + "".join(f"  c{c} {row[f'c{c}']}" for c in (1, 4, 16)), flush=True)


if __name__ == "__main__":
    main()
