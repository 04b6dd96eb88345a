"""Budget ``auto`` as a user meets it: the first start measures, later ones read; then its speed beside fixed widths."""

from __future__ import annotations

import random
import time
from statistics import median, quantiles
from typing import Any

from ways import Way, tree

CONCURRENCIES = (1, 4, 16)
WIDTHS, BESIDE = ("tree8", "tree16", "tree32", "tree64"), ("dflash", "tree32-mask")
"""The servers of fixed width that ``auto`` is held against, and others that are timed beside them."""
REPEATS = 20
DRAWS = 200
WITHIN = 0.95
FIRST_START_S = 420.0
CHOSEN = "budget auto is"

Pass = list[tuple[int, float]]
"""Tokens and seconds of each prompt's answer."""


def start_servers(run: Any) -> dict[int, str]:
    """A server with ``auto`` for each concurrency: the first of them measures all widths by child servers."""
    names = {c: f"auto-c{c}" for c in CONCURRENCIES}
    for concurrency, name in names.items():
        flags = f"{tree('auto')} --speculative-ddtree-concurrency {concurrency}"
        server = run.start_one(name, Way(flags, timed=True))
        if concurrency == CONCURRENCIES[0] and not _has_chosen(server):
            raise LookupError(f"the server that measures did not come so far: {server.tail(25)}")
    run.side_by_side([(name, lambda n=name: run.greet(n)) for name in names.values()])
    for name in names.values():
        told = [line for line in run.servers[name].said().splitlines() if CHOSEN in line or "in a child server" in line]
        run.note(f"{name} says", told)
    return {c: name for c, name in names.items() if name in run.ready}


def _has_chosen(server: Any) -> bool:
    """Whether it has measured, once it has; the others may then start."""
    until = time.monotonic() + FIRST_START_S
    while time.monotonic() < until and server.alive():
        if any(CHOSEN in line for line in server.said().splitlines()):
            return True
        time.sleep(1)
    return False


def compare(run: Any, names: dict[int, str], piece: str) -> None:
    """In turn with every fixed width, each ``auto`` at the concurrency that it was started for."""
    fixed = [name for name in run.args.only if name in run.ready and name in (*WIDTHS, *BESIDE)]
    passes: dict[int, dict[str, list[Pass]]] = {c: {} for c in names}
    walls: dict[int, dict[str, list[float]]] = {c: {} for c in names}
    for name in (*fixed, *names.values()):
        run.servers[name].warm_up(run.prompts)
    for _ in range(REPEATS):
        for concurrency, auto in names.items():
            batch = {1: run.prompts[::2], 4: run.prompts, 16: run.prompts * 2}[concurrency]
            for name in (*fixed, auto):
                if run.is_late(piece):
                    break
                answers, wall_s = run.servers[name].answer_all(batch, concurrency)
                walls[concurrency].setdefault(name, []).append(round(wall_s, 3))
                taken = [(int(answer.meta["completion_tokens"]), round(answer.seconds, 4)) for answer in answers]
                passes[concurrency].setdefault(name, []).append(taken)
        run.results["budgets"] = {f"c{c}": {"passes": rows, "wall_s": walls[c]} for c, rows in passes.items()}
        run.write()
    for concurrency, auto in names.items():
        rows = passes[concurrency]
        rows = {name: taken[: min(map(len, rows.values()))] for name, taken in rows.items()}
        if len(rows.get(auto, ())) < 2:
            raise LookupError(f"no two passes at c={concurrency}")
        speeds = {name: speed(concurrency, taken) for name, taken in rows.items()}
        ratio, low, high = against_best(concurrency, rows, auto)
        run.results["budgets"][f"c{concurrency}"] = {
            "tok_s": speeds, "auto_against_best": ratio, "quartiles": [low, high], "passes": rows,
            "wall_s": walls[concurrency],
        }  # fmt: skip
        count = len(rows[auto])
        run.say(f"auto at c={concurrency}: {speeds}; {ratio} [{low}, {high}] of the best, {count} passes")
        run.must(auto, ratio >= WITHIN, f"auto is {ratio} [{low}, {high}] of the best at c={concurrency}")


def speed(concurrency: int, passes: list[Pass]) -> float:
    """Tokens a second while all places are taken, each prompt by its median time over the passes.

    A slow moment moves nothing. That is more than tokens over the time of a pass, at whose end places are empty.
    """
    prompts = list(zip(*passes, strict=True))
    tokens = sum(median(tokens for tokens, _ in answers) for answers in prompts)
    seconds = sum(median(seconds for _, seconds in answers) for answers in prompts)
    return round(concurrency * tokens / seconds, 1)


def against_best(concurrency: int, rows: dict[str, list[Pass]], auto: str) -> tuple[float, float, float]:
    """``auto`` over the best width, and quartiles of that over halves of the passes drawn at random.

    In each draw the best width is picked in one half and both are timed in the other, since the best of several
    noisy figures is better than it is.
    """
    count = len(rows[auto])
    ratios = []
    chance = random.Random(1)
    for _ in range(DRAWS):
        order = chance.sample(range(count), count)
        pick, time_in = order[: count // 2], order[count // 2 :]
        widths = {n: speed(concurrency, [taken[i] for i in pick]) for n, taken in rows.items() if n in WIDTHS}
        best = max(widths, key=lambda name: widths[name])
        ours, theirs = (speed(concurrency, [rows[name][i] for i in time_in]) for name in (auto, best))
        ratios.append(ours / theirs)
    low, middle, high = quantiles(ratios, n=4)
    return round(middle, 3), round(low, 3), round(high, 3)
