"""Tokens a round of the native engine over given prompts, one at a time and greedy, to hold SGLang's trees against.

    python benchmarks/sglang_h200/native_tau.py --model DIR --draft DIR --dtype bfloat16 --budgets 16 32 64 < ids.json

Reads a list of lists of token ids; prints one JSON object: by budget the text, tokens and rounds of each prompt.
"""

from __future__ import annotations

import argparse
import json
import sys

from ddtree import Engine, SamplingParams, Speculation


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "draft", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--budgets", type=int, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--graphs", default="on", help="off on a machine without a GPU")
    args = parser.parse_args()
    prompts: list[list[int]] = json.load(sys.stdin)
    engine = Engine.load(args.model, args.draft, dtype=args.dtype, max_model_len=2048, max_batch=1, graphs=args.graphs)
    params = SamplingParams(max_new_tokens=args.tokens)
    told = {}
    for budget in args.budgets:
        done = [engine.generate([ids], params, speculation=Speculation("tree", budget))[0] for ids in prompts]
        told[budget] = {
            "texts": [answer.token_ids for answer in done],
            "tokens": [sum(answer.stats.accepted_lengths) for answer in done],
            "rounds": [answer.stats.rounds for answer in done],
        }
    print("\n" + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
