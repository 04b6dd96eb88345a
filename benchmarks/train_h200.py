"""A drafter for SmolLM2-135M-Instruct on H200s: data, training, ablations, tau of old and new. Every piece resumes.

    python benchmarks/train_h200.py data     --work W --target T --prompts P --name d0 --tokens 9000000 -- FLAGS
    python benchmarks/train_h200.py train    --work W --target T --name main --seconds 1000 --stop-after 500 -- FLAGS
    python benchmarks/train_h200.py ablate   --work W --target T --prompts P --old O --seconds 200 --variants base,reach
    python benchmarks/train_h200.py evaluate --work W --target T --prompts P --draft DIR --name new
    python benchmarks/train_h200.py table    --work W
    python benchmarks/train_h200.py parts    --work W --draft DIR --out OUT

T is the target, O the old drafter, P the folder of prompt files (gsm8k_train, mbpp, alpaca_train to train with;
gsm8k_test100, humaneval, mt_bench to measure with), W a folder for all that is made. The same command again goes on
where it was cut off. FLAGS go to `ddtree train data` or `run`; `train` and `ablate` read every W/data/*. `parts` splits
the drafter into files of less than 16 MiB. `train_h200.sh` starts pieces in the background, one a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRAINING = {"gsm8k_train": 4.0, "mbpp": 1.0, "alpaca_train": 2.0}
CODE_WEIGHT = 3.0  # of MBPP's problems as functions to complete
EVALUATION = ("gsm8k_test100", "humaneval", "mt_bench")
BUDGETS = "chain,8,16,32,64,128"
PART_BYTES = 15 << 20

# What each ablation changes; everything else as `ddtree train run` has it.
VARIANTS: dict[str, list[str]] = {
    "base": [],
    "token-only": ["--token-share", "1"],
    "distribution-only": ["--token-share", "0"],
    "top-8": ["--distribution", "top-k", "--top-k", "8"],
    "argmax": ["--token-share", "0", "--distribution", "argmax"],
    "decay-7": ["--decay-tokens", "7"],
    "reach": ["--decay-tokens", "8", "--reach-share", "0.8"],
    "whole-head": ["--head-share", "1"],
    "dense-anchors": ["--rows", "8", "--anchors", "1024"],
    "half-batch": ["--rows", "8"],
    "rate-3e-3": ["--matrix-rate", "3e-3"],
    "from-old": ["--matrix-rate", "3e-3"],
}


def ddtree(args: argparse.Namespace, words: list[str], *, processes: int = 1, capture: bool = False) -> str:
    """Run the command of this checkout, in several processes through torchrun."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(args.work / "inductor"),
    }
    together = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command = [sys.executable, "-m", *(together if processes > 1 else []), "ddtree", *words]
    print("$", "ddtree", *words, flush=True)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE if capture else None, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout or ""


def data(args: argparse.Namespace) -> None:
    """The target's answers, into W/data/NAME."""
    code = args.work / "code.jsonl"
    args.work.mkdir(parents=True, exist_ok=True)
    maker = ROOT / "examples" / "train-drafter" / "code_prompts.py"
    subprocess.run([sys.executable, str(maker), str(prompt_file(args, "mbpp")), str(code)], check=True)
    files = [f"{prompt_file(args, name)}:{weight}" for name, weight in TRAINING.items()] + [f"{code}:{CODE_WEIGHT}"]
    prompts = [word for file in files for word in ("--prompts", file)]
    excluded = [word for name in EVALUATION for word in ("--exclude", str(prompt_file(args, name)))]
    stop = ["--stop-after", str(args.stop_after)] if args.stop_after else []
    ddtree(args, [
        "train", "data", "--model", str(args.target), "--out", str(args.work / "data" / args.name), *prompts,
        *excluded, "--tokens", str(args.tokens), "--seed", str(args.seed), "--greedy-share", "0.8",
        "--self-prompt-share", "0.8", *stop, *args.flags,
    ])  # fmt: skip


def train(args: argparse.Namespace) -> None:
    """One run in W/runs/NAME."""
    run(args, args.name, args.flags, args.stop_after)


def ablate(args: argparse.Namespace) -> None:
    """Short runs one after another, each measured before the next begins."""
    for name in args.variants.split(","):
        flags = list(VARIANTS[name])
        if name.startswith("from-old"):
            flags += ["--start-from", str(args.old)]
        run(args, f"ablation-{name}", [*flags, *args.flags], None)
        args.draft, args.name = args.work / "runs" / f"ablation-{name}" / "drafter", f"ablation-{name}"
        evaluate(args)
        table(args)


def run(args: argparse.Namespace, name: str, flags: list[str], stop_after: float | None) -> None:
    folders = sorted(path for path in (args.work / "data").iterdir() if (path / "data.json").exists())
    ddtree(args, [
        "train", "run", "--model", str(args.target), "--out", str(args.work / "runs" / name), "--resume",
        *[word for folder in folders for word in ("--data", str(folder))],
        "--seconds", str(args.seconds), "--held-out", "512", "--held-out-every", "100", "--name", "smollm2-135m-dflash",
        "--licence", "apache-2.0", "--base-model", "HuggingFaceTB/SmolLM2-135M-Instruct",
        *(["--stop-after", str(stop_after)] if stop_after else []), *flags,
    ], processes=args.processes)  # fmt: skip


def evaluate(args: argparse.Namespace) -> None:
    """Tau of a drafter by data set and budget, into W/tau/NAME.json; what is there stays."""
    place = args.work / "tau" / f"{args.name}.json"
    if place.exists():
        return
    sets = [word for name in args.sets.split(",") for word in ("--prompts", str(prompt_file(args, name)))]
    count = ["--count", str(args.count)] if args.count else []
    told = ddtree(args, [
        "train", "evaluate", "--model", str(args.target), "--draft", str(args.draft), *sets, *count,
        "--budgets", args.budgets, "--max-new-tokens", str(args.max_new_tokens), "--json",
        *(["--keep"] if args.keep else []),
    ], capture=True)  # fmt: skip
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_suffix(".unfinished")
    draft.write_text(json.dumps(json.loads(told), indent=1))
    draft.replace(place)


def table(args: argparse.Namespace) -> None:
    """Everything measured so far, as text and as W/results.json."""
    results: dict[str, Any] = {}
    for path in sorted((args.work / "tau").glob("*.json")):
        measured = json.loads(path.read_text())
        rows: dict[str, dict[str, float]] = {}
        for row in measured["rows"]:
            rows.setdefault(row["data_set"], {})[str(row["plan"])] = row["tokens"] / max(row["rounds"], 1)
        results[path.stem] = {"tau": rows, "drafter_sha256": measured["drafter_sha256"], **run_facts(args, path.stem)}
    (args.work / "results.json").write_text(json.dumps(results, indent=1))
    plans = list(dict.fromkeys(plan for one in results.values() for tau in one["tau"].values() for plan in tau))
    print(f"{'drafter':28}{'prompts':16}" + "".join(f"{plan:>8}" for plan in plans) + "   held out   steps")
    for name, one in results.items():
        for data_set, tau in one["tau"].items():
            cells = "".join(f"{tau[plan]:8.3f}" if plan in tau else f"{'-':>8}" for plan in plans)
            held_out = f"{one['held_out_tau']:8.3f}" if "held_out_tau" in one else f"{'-':>8}"
            print(f"{name:28}{data_set:16}{cells}   {held_out}   {one.get('steps', '-')}")


def run_facts(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """What the run of this name, if there is one, says of itself."""
    folder = args.work / "runs" / name
    if not (folder / "state.json").exists():
        return {}
    state = json.loads((folder / "state.json").read_text())
    lines = (folder / "held_out.csv").read_text().splitlines()
    held_out = dict(zip(lines[0].split(","), lines[-1].split(","), strict=True))
    times = folder / "step_times.json"
    return {
        "steps": state["step"],
        "anchors": state["anchors"],
        "train_s": state["train_s"],
        "held_out_tau": float(held_out["tau"]),
        "held_out_loss": float(held_out["loss"]),
        "step_times": json.loads(times.read_text()) if times.exists() else None,
        "settings": json.loads((folder / "settings.json").read_text()),
    }


def parts(args: argparse.Namespace) -> None:
    """The drafter's files, the weights in parts: `cat model.safetensors.part* > model.safetensors`."""
    args.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(args.draft.iterdir()):
        if path.stat().st_size <= PART_BYTES:
            shutil.copy(path, args.out / path.name)
            continue
        content = path.read_bytes()
        for number, start in enumerate(range(0, len(content), PART_BYTES)):
            (args.out / f"{path.name}.part{number}").write_bytes(content[start : start + PART_BYTES])


def prompt_file(args: argparse.Namespace, name: str) -> Path:
    return Path(args.prompts) / f"{name}.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pieces = {piece.__name__: piece for piece in (data, train, ablate, evaluate, table, parts)}
    parser.add_argument("piece", choices=pieces)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", default="main")
    parser.add_argument("--seconds", type=float, default=1000.0, help="of training")
    parser.add_argument("--processes", type=int, default=1, help="one a GPU, in training")
    parser.add_argument("--stop-after", type=float, help="of this process, compilation included")
    parser.add_argument("--tokens", type=int, default=30_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--sets", default=",".join(EVALUATION))
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--count", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--keep", action="store_true", help="evaluate: what was measured goes beside the drafter")
    arguments, _, flags = _split(sys.argv[1:])
    args = parser.parse_args(arguments)
    args.flags = flags
    if unknown := sorted(set(args.variants.split(",")) - set(VARIANTS)):
        parser.error(f"no variant {', '.join(unknown)}: there are {', '.join(VARIANTS)}")
    args.work.mkdir(parents=True, exist_ok=True)
    began = time.time()
    pieces[args.piece](args)
    print(f"{args.piece}: {time.time() - began:.0f} s", flush=True)


def _split(words: list[str]) -> tuple[list[str], str, list[str]]:
    """At the first ``--``."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], "--", words[at + 1 :]


if __name__ == "__main__":
    main()
