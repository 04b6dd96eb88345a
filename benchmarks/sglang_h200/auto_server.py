"""Budget ``auto`` as a user meets it: the first start measures, later ones read; then its speed beside fixed widths."""

from __future__ import annotations

from statistics import median
from typing import Any

from servers import figures
from ways import Way, tree

CONCURRENCIES = (1, 4, 16)
REPEATS = 5
WITHIN = 0.95
FIRST_START_S = 420.0


def start_servers(run: Any) -> dict[int, str]:
    """A server with ``auto`` for each concurrency: the first of them measures all widths by child servers."""
    names = {c: f"auto-c{c}" for c in CONCURRENCIES}
    for concurrency, name in names.items():
        flags = f"{tree('auto')} --speculative-ddtree-concurrency {concurrency}"
        server = run.start_one(name, Way(flags, timed=True))
        if concurrency == CONCURRENCIES[0] and not run.wait(server, FIRST_START_S):
            raise LookupError("the server that measures did not come up")
    for name in names.values():
        run.greet(name)
    for name in names.values():
        log = run.servers[name].log
        lines = log.read_text(errors="replace").splitlines() if log else []
        told = [line for line in lines if "budget auto is" in line or "in a child server" in line]
        run.note(f"{name} says", told)
    return {c: name for c, name in names.items() if name in run.ready}


def compare(run: Any, names: dict[int, str], piece: str) -> None:
    """In turn with every fixed width, each ``auto`` at the concurrency that it was started for."""
    fixed = [name for name in run.args.only if name in run.ready]
    rows: dict[int, dict[str, list[float]]] = {c: {} for c in names}
    for name in (*fixed, *names.values()):
        run.servers[name].warm_up(run.prompts)
    for _ in range(REPEATS):
        for concurrency, auto in names.items():
            batch = {1: run.prompts[::2], 4: run.prompts, 16: run.prompts * 2}[concurrency]
            key = "request_tok_s" if concurrency == 1 else "total_tok_s"
            for name in (*fixed, auto):
                if run.is_late(piece):
                    break
                taken = figures(*run.servers[name].answer_all(batch, concurrency))
                rows[concurrency].setdefault(name, []).append(taken[key])
    for concurrency, auto in names.items():
        medians = {name: median(taken) for name, taken in rows[concurrency].items()}
        widths = {name: speed for name, speed in medians.items() if name != auto}
        best = max(widths, key=lambda name: widths[name])
        ratio = medians[auto] / widths[best]
        run.results["budgets"][f"c{concurrency}"] = {
            "tok_s": rows[concurrency], "best_fixed": best, "auto_against_best": round(ratio, 3),
        }  # fmt: skip
        run.say(f"auto at c={concurrency}: {medians}; {ratio:.3f} of {best}")
        run.must(auto, ratio >= WITHIN, f"auto is {ratio:.3f} of {best} at c={concurrency}")
