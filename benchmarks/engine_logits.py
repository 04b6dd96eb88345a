"""Logits of captured rounds against those of eager ones; a piece of `engine_h200.py`."""

import argparse
from typing import Any

import torch
from prompt_files import read_prompts

from ddtree import Engine, SamplingParams, Speculation
from ddtree.engine.groups import MAX_ROUND_ROWS
from ddtree.engine.round import draft, inject, verify
from ddtree.engine.speculation import DraftShape
from ddtree.engine.state import SamplingFlags
from ddtree.kernels.tree_tensors import TreeTensors, root_only

BATCHES = (1, 2, 8)
BUDGETS = (1, 7, 8, 9, 15, 16, 31, 64, 127, 128, 255, 512, 1024)


def logits(args: argparse.Namespace) -> dict[str, Any]:
    """The same round of the same sequences, eager twice and captured: trees and logits at every node, bit for bit.

    Between budgets: a smaller tree is the beginning of a larger one, so their logits at the shared nodes are compared
    too, in steps of bfloat16 at the size of the row's largest logit. Sequences stand some rounds into their answers,
    at ragged lengths.
    """
    engine = Engine.load(args.model, args.draft, dtype=args.dtype, max_model_len=2048, max_batch=8, graphs="on")
    prompts = read_prompts(args.prompts, ("gsm8k_test100", "humaneval"), 4)
    params = SamplingParams(max_new_tokens=512, ignore_eos=True)
    rows = []
    for batch in BATCHES:
        asked = [engine.submit(prompt, params, speculation=Speculation("tree", 16)) for prompt in prompts[:batch]]
        while min(len(sequence.output) for sequence in asked) < 40:
            engine.step()
        torch.cuda.synchronize()
        slots = torch.tensor([sequence.slot for sequence in asked], device=engine.target.device)
        inject(engine.state, _select(engine, slots), engine.drafter)  # the taps of the last round, once for all
        shared: torch.Tensor | None = None
        for budget in (0, *BUDGETS):
            if batch * (budget + 1) > MAX_ROUND_ROWS:
                continue
            shape = DraftShape("tree" if budget else "ar", budget, min(budget, 64))
            tree, eager = _play(engine, slots, shape)
            again = _play(engine, slots, shape)[1]
            captured_tree, captured = _captured(engine, slots, shape)
            rows.append({
                "batch": batch, "budget": budget,
                "trees_equal": all(
                    torch.equal(a, b) for a, b in zip(vars(tree).values(), vars(captured_tree).values(), strict=True)
                ),
                "logits_equal": torch.equal(eager, captured),
                "again_equal": torch.equal(eager, again),
                "finite": bool(eager.isfinite().all()),
                "steps_to_smaller_budget": None if shared is None else _steps(shared, eager),
            })  # fmt: skip
            shared = eager
            print(rows[-1], flush=True)
        for sequence in asked:
            engine.cancel(sequence)
    return {"facts": engine.facts(), "rows": rows, "faults": sum(not row["logits_equal"] for row in rows)}


def _select(engine: Engine, slots: torch.Tensor) -> Any:
    return engine.state.select(slots, SamplingFlags(), engine.state.max_model_len)


def _play(engine: Engine, slots: torch.Tensor, shape: DraftShape) -> tuple[TreeTensors, torch.Tensor]:
    """A round up to its logits; nothing is committed, so it can be played again."""
    batch, kernels = _select(engine, slots), engine.target.kernels
    if not shape.budget:
        tree = root_only(batch.roots)
    else:
        logits = draft(engine.state, batch, engine.drafter)
        log_probs, token_ids = kernels.top_log_probs(logits, shape.top_k, batch.sharpness)
        tree = kernels.build_tree(log_probs, token_ids, batch.roots, shape.budget, batch.room)
    return tree, verify(engine.state, batch, engine.target, tree, ()).logits


def _captured(engine: Engine, slots: torch.Tensor, shape: DraftShape) -> tuple[TreeTensors, torch.Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _play(engine, slots, shape)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree, seen = _play(engine, slots, shape)
    seen.zero_()  # what is compared was written by the replay
    graph.replay()
    torch.cuda.synchronize()
    return tree, seen


def _steps(smaller: torch.Tensor, larger: torch.Tensor) -> float:
    """Largest difference at the nodes of the smaller tree, in steps of bfloat16 at the row's largest logit."""
    larger = larger[:, : smaller.shape[1]].float()
    step = 2.0 ** (larger.abs().amax(-1, keepdim=True).log2().floor() - 7)
    return round(float(((smaller.float() - larger).abs() / step).max()), 3)
