"""What `budget="auto"` loses against the best fixed budget, without a GPU: the real policy over recorded drafts.

    python benchmarks/policy_replay.py record --model DIR --draft DIR --prompts DIR --out tapes.npz
    python benchmarks/policy_replay.py replay tapes.npz --costs benchmarks/results/h200/engine_load_bfloat16.json
    python benchmarks/policy_replay.py tau tapes.npz

A greedy answer is the same whatever drafts it, so what a tree would promise and hold can be told once for every place
of it; any policy then runs over that as it would have run. `record` takes some seconds a prompt on a CPU. Rounds take
what they took on a GPU; tokens a second are therefore SIMULATED, of full batches, and only ratios count.
"""

import argparse
import json
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddtree.engine.budget_policy import CANDIDATES, CUTS, BudgetPolicy, Outlook
from ddtree.kernels.forecast import Forecast
from ddtree.tree.draft_tree import ROOT, DraftTree

Costs = dict[tuple[int, int], float]
"""Milliseconds of a round, by batch and budget."""
FORECAST_MS = 0.004
"""What telling about smaller budgets adds to a round."""
SETS = ("gsm8k_test100", "humaneval", "mt_bench")
MOST_PROMPT, ROW, BLOCKS = 250, 512, 64


@dataclass(frozen=True)
class Tape:
    """One answer.

    Attributes:
        kind: the set that its prompt comes from.
        masses: ``[places, cuts, depths]``, as in `Forecast`, of a tree drafted with the root at each place.
        held: int ``[places, cuts]``, accepted nodes of the tree of each budget.
    """

    kind: str
    masses: np.ndarray
    held: np.ndarray


def read_tapes(path: Path) -> list[Tape]:
    """Tapes as `write_tapes` wrote them."""
    with np.load(path) as found:
        names = sorted(name.removesuffix(".held") for name in found.files if name.endswith(".held"))
        return [Tape(name.split(".")[1], found[f"{name}.masses"], found[f"{name}.held"]) for name in names]


def write_tapes(path: Path, tapes: Sequence[Tape]) -> None:
    """Masses as float16."""
    arrays: dict[str, Any] = {}
    for number, tape in enumerate(tapes):
        arrays[f"{number:03}.{tape.kind}.masses"] = tape.masses.astype(np.float16)
        arrays[f"{number:03}.{tape.kind}.held"] = tape.held.astype(np.int8)
    np.savez_compressed(path, **arrays)


def read_costs(path: Path) -> Costs:
    """The table of costs that `engine_h200.py load` writes."""
    told = json.loads(path.read_text())["auto_costs_ms"]
    return {(int(key.split(" x ")[0]), int(key.split(" x ")[1])): ms for key, ms in told.items()}


@dataclass
class Answer:
    """An answer on its way: how far along its tape."""

    tape: Tape
    place: int
    outlook: Outlook

    def take(self, budget: int) -> int:
        """Tokens that a round brings."""
        held = int(self.tape.held[self.place, CUTS.index(budget)]) if budget else 0
        taken = min(1 + held, len(self.tape.held) - self.place)
        self.place += taken
        return taken

    @property
    def is_whole(self) -> bool:
        return self.place == len(self.tape.held)


@dataclass(frozen=True)
class Run:
    """A closed loop: tokens a second while all places were taken, and the budgets of its rounds."""

    tok_s: float
    budgets: Counter[int]


def closed_loop(
    tapes: Sequence[Tape], costs: Costs, concurrency: int, chooser: BudgetPolicy | int, seed: int, answers: int
) -> Run:
    """Answers in random order, so many at a time, by a policy or with a fixed budget."""
    order = random.Random(seed)
    waiting = [Answer(order.choice(tapes), 0, Outlook()) for _ in range(answers)]
    live, waiting = waiting[:concurrency], waiting[concurrency:]
    for answer in live:  # the first ones begin anywhere, so that they do not all end together
        answer.place = order.randrange(len(answer.tape.held))
    ms, tokens, budgets = 0.0, 0, Counter[int]()
    while len(live) == concurrency:
        if isinstance(chooser, BudgetPolicy):
            outlooks = [answer.outlook for answer in live]
            budget, is_news = chooser.next_round(concurrency, outlooks)
            if is_news and budget:
                chooser.learn(outlooks, budget, forecast(live, budget))
            ms += FORECAST_MS if budget else 0.0
        else:
            budget = chooser
        ms += costs[concurrency, budget]
        budgets[budget] += 1
        tokens += sum(answer.take(budget) for answer in live)
        live = [answer for answer in live if not answer.is_whole]
        while waiting and len(live) < concurrency:
            live.append(waiting.pop())
    return Run(1e3 * tokens / ms, budgets)


def forecast(live: Sequence[Answer], budget: int) -> Forecast:
    """What a round of ``budget`` tells: of larger budgets the same as of its own."""
    cut = CUTS.index(budget)
    masses = np.array([answer.tape.masses[answer.place] for answer in live], np.float64)
    held = np.array([answer.tape.held[answer.place] for answer in live], np.int64)
    masses[:, cut + 1 :], held[:, cut + 1 :] = masses[:, cut, None], held[:, cut, None]
    return Forecast(masses, held)


def replay(tapes: Sequence[Tape], costs: Costs, concurrency: int, seeds: int = 6) -> dict[str, object]:
    """`auto`, from a start that knows nothing but costs, and every fixed budget, over the same answers."""
    answers = max(6 * concurrency, 60)

    def policy() -> BudgetPolicy:
        fresh = BudgetPolicy(tapes[0].masses.shape[2])
        fresh.cost_ms.update(costs)
        return fresh

    fixed = {
        budget: statistics.mean(
            closed_loop(tapes, costs, concurrency, budget, seed, answers).tok_s for seed in range(seeds)
        )
        for budget in CANDIDATES
        if (concurrency, budget) in costs
    }
    runs = [closed_loop(tapes, costs, concurrency, policy(), seed, answers) for seed in range(seeds)]
    best = max(fixed, key=lambda budget: fixed[budget])
    taken = sum((run.budgets for run in runs), Counter[int]())
    return {
        "concurrency": concurrency, "best_budget": best, "answers": answers, "seeds": seeds,
        "auto_against_best": round(statistics.mean(run.tok_s for run in runs) / fixed[best], 4),
        "fixed_against_best": {str(budget): round(tok_s / fixed[best], 3) for budget, tok_s in fixed.items()},
        "auto_budgets": {str(budget): round(n / taken.total(), 3) for budget, n in sorted(taken.items())},
    }  # fmt: skip


def taus(tapes: Sequence[Tape]) -> dict[str, dict[str, float]]:
    """Tokens a round of each fixed budget commits, over all rounds of a set's answers; nothing of it is estimated."""
    told: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(tape.kind for tape in tapes):
        own = [tape for tape in tapes if tape.kind == kind]
        for budget in CUTS:
            answers, rounds = [Answer(tape, 0, Outlook()) for tape in own], 0
            for answer in answers:
                while not answer.is_whole:
                    answer.take(budget)
                    rounds += 1
            told.setdefault(kind, {})[str(budget)] = round(sum(len(tape.held) for tape in own) / rounds, 3)
    return told


def record(
    model: Path, draft: Path, prompts: Path, sets: Sequence[str], count: int, draft_temperature: float | None = None
) -> Iterator[Tape]:
    """Greedy answers of at most 256 tokens in float32, and what a tree drafted at each place promises and holds."""
    from prompt_files import read_prompts

    from ddtree import Engine, SamplingParams, Speculation
    from ddtree.engine.prompt import encode_prompt

    engine = Engine.load(
        model, draft, device="cpu", dtype="float32", max_model_len=1024, max_batch=1,
        draft_temperature=draft_temperature,
    )  # fmt: skip
    blocks = _Blocks(engine, draft)
    for kind in sets:
        for text in read_prompts(prompts, (kind,), count):
            prompt = encode_prompt(text, engine.tokenizer, engine.target.config.vocab_size)
            if len(prompt) > MOST_PROMPT:
                continue
            done = engine.generate([prompt], SamplingParams(max_new_tokens=256), speculation=Speculation("tree", 8))[0]
            masses, held = blocks.told([*prompt, *done.token_ids], len(prompt))
            yield Tape(kind, masses, held)


class _Blocks:
    """Drafts at every place of a text at once, with the pass that training uses."""

    def __init__(self, engine: Any, draft: Path) -> None:
        from ddtree.train.compiling import plain
        from ddtree.train.taps import FrozenTarget
        from ddtree.train.trainable_drafter import DraftPass, TrainableDrafter

        drafter = TrainableDrafter(engine.drafter.config, {})
        drafter.read(draft)
        drafter.requires_grad_(False)
        self._depths, self._head = engine.drafter.config.block_size - 1, engine.target.head
        self._temperature = engine.drafter.config.draft_temperature
        self._target = FrozenTarget(engine.target, engine.drafter.config.tap_layers, 1, ROW, plain)
        self._draft = DraftPass(drafter, engine.target, 1, ROW, BLOCKS, None, plain)

    def told(self, text: list[int], answer: int) -> tuple[np.ndarray, np.ndarray]:
        """Masses and accepted nodes at every place of the answer, which begins at ``answer``."""
        import torch

        from ddtree.train.anchors import Anchors, looks_of
        from ddtree.train.packing import PackedRows
        from ddtree.tree import build

        n, here = min(len(text), ROW), torch.arange(ROW)
        tokens = torch.zeros(1, ROW, dtype=torch.int64)
        tokens[0, :n] = torch.tensor(text[:n])
        rest = here >= n  # each a conversation of its own
        rows = PackedRows(
            tokens, torch.where(rest, here, 0)[None], torch.where(rest, here, answer)[None],
            torch.where(rest, here + 1, n)[None],
        )  # fmt: skip
        masses, held = [], []
        with torch.no_grad():
            taps = self._target(rows, says_next=False).taps
            for first in range(answer, n - 1, BLOCKS):
                index = torch.arange(first, first + BLOCKS).clamp(max=n - 2)[None]
                at = (index[..., None] + torch.arange(1, self._depths + 1)).clamp(max=ROW - 1)
                anchors = Anchors(
                    index, torch.ones_like(index, dtype=torch.bool), tokens.gather(1, index), torch.zeros_like(index),
                    tokens.gather(1, at.flatten(1)).view_as(at), at < n, at - 1,
                )  # fmt: skip
                looks = looks_of(torch.full((1, BLOCKS), self._depths), self._depths, BLOCKS * self._depths)
                hidden = self._draft(rows, anchors, looks, taps)[0]
                logits = ((hidden @ self._head.T).float() / self._temperature).log_softmax(-1)
                log_probs, candidates = (each.view(BLOCKS, self._depths, -1).numpy() for each in logits.topk(64))
                for block in range(min(BLOCKS, n - 1 - first)):
                    tree = build(log_probs[block], candidates[block], CUTS[-1])
                    told = _told(tree, text[first + block + 1 : n], self._depths)
                    masses.append(told[0])
                    held.append(told[1])
        return np.array(masses), np.array(held)


def _told(tree: DraftTree, coming: list[int], depths: int) -> tuple[np.ndarray, list[int]]:
    node, accepted = ROOT, []
    for token in coming:
        if (child := tree.child(node, token)) is None:
            break
        accepted.append(node := child)
    masses, probabilities = np.zeros((len(CUTS), depths)), np.exp(tree.log_scores)
    for row, cut in enumerate(CUTS):
        np.add.at(masses[row], tree.depths[:cut] - 1, probabilities[:cut])
    return masses, [sum(node < cut for node in accepted) for cut in CUTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pieces = parser.add_subparsers(dest="piece", required=True)
    own = pieces.add_parser("record")
    for name in ("model", "draft", "prompts", "out"):
        own.add_argument(f"--{name}", type=Path, required=True)
    own.add_argument("--sets", nargs="+", default=SETS, help="files in the folder of prompts, without .jsonl")
    own.add_argument("--count", type=int, default=20, help="prompts of each set")
    own.add_argument("--draft-temperature", type=float, help="instead of the drafter's own")
    own = pieces.add_parser("replay")
    own.add_argument("tapes", type=Path)
    own.add_argument("--costs", type=Path, required=True)
    own.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    own.add_argument("--out", type=Path, help="JSON to write")
    own = pieces.add_parser("tau")
    own.add_argument("tapes", type=Path)
    given = parser.parse_args()
    if given.piece == "record":
        tapes: list[Tape] = []
        for tape in record(given.model, given.draft, given.prompts, given.sets, given.count, given.draft_temperature):
            tapes.append(tape)
            write_tapes(given.out, tapes)
            print(len(tapes), tape.kind, len(tape.held), "places", flush=True)
        return
    if given.piece == "tau":
        print(json.dumps(taus(read_tapes(given.tapes)), indent=1))
        return
    tapes, costs, rows = read_tapes(given.tapes), read_costs(given.costs), []
    texts = {
        "maths and code": [t for t in tapes if t.kind != "mt_bench"],
        "chat": [t for t in tapes if t.kind == "mt_bench"],
    }
    for name, some in texts.items():
        for concurrency in given.concurrency if some else ():
            rows.append({"text": name, "tapes": len(some), **replay(some, costs, concurrency)})
            print(rows[-1], flush=True)
    if given.out:
        given.out.write_text(
            json.dumps({"simulated": "round times as measured, no GPU", "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
