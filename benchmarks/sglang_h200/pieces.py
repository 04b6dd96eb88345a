"""The pieces of a run, each a function of the `Benchmark`: what it asks of which servers, and what it notes."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from auto_server import start_auto
from exact_draws import CASES, check_draws, joint_law
from near_ties import MOST_STEPS, STEP, partings, verdict
from pool_checks import check_abort, check_prefix, check_retraction, check_soak
from servers import figures
from ways import EXACT_MOST, WAYS

IN_TURN = ("ar", "dflash", "tree32", "tree64", "tree16", "tree8", "tree32-split", "auto")
CONCURRENCIES = (1, 4, 16)
LEAST_P = 1e-3


def speeds(run: Any, piece: str = "speeds") -> None:
    """In turn, so that a slow minute of the machine meets all of them; the first round is taken before any repeat."""
    names = [name for name in IN_TURN if name in run.ready]
    for _ in range(run.args.repeats):
        for concurrency in CONCURRENCIES:
            batch = {1: run.prompts[::2], 4: run.prompts, 16: run.prompts * 2}[concurrency]
            for name in [name for name in names if name in run.ready]:
                if run.is_late(piece):
                    return
                taken = run.guarded(
                    name, lambda n=name, b=batch, c=concurrency: figures(*run.servers[n].answer_all(b, c))
                )
                if taken is None:
                    run.ready.discard(name)  # what failed once would fail again
                else:
                    rows = run.results["speeds"].setdefault(name, {})
                    rows.setdefault(f"c{concurrency}", []).append(taken)


def texts(run: Any) -> None:
    """Alone or ragged four at a time, from an empty cache; then where they part from plain decoding's."""

    def take(name: str) -> None:
        server, way = run.servers[name], WAYS[name]
        server.flush()
        cold, cold_s = server.answer_all(run.prompts, 1 if way.alone else 4)
        row = run.way(name)
        row["cold"] = figures(cold, cold_s)
        row["cuda_graph"] = b"cuda graph: True" in server.log.read_bytes() if server.log else None
        run.texts[name] = cold
        run.say(f"{name}: {json.dumps(row)}")

    names = [name for name in run.args.only if name in run.ready]
    run.side_by_side([(name, lambda n=name: take(n)) for name in names])
    run.side_by_side([(name, lambda n=name: _compare(run, n)) for name in names])


def _compare(run: Any, name: str) -> None:
    way = WAYS[name]
    if not way.against or name not in run.texts:
        return
    if way.against not in run.texts:
        run.way(name)["texts"] = {"against": way.against, "not_compared": f"{way.against} has no texts"}
        return
    plain = way.against if way.against.startswith("ar") else "ar"
    places, parted = partings(run.servers[plain], run.prompts, run.texts[name], run.texts[way.against])
    row = verdict(places, parted, EXACT_MOST if way.against == "ar-exact" else MOST_STEPS * STEP)
    run.way(name)["texts"] = {"against": way.against, "first_differences": places, **row}
    shown = {key: row[key] for key in ("equal", "near_ties", "faults", "largest_gap", "gaps_in_steps")}
    run.say(f"{name} against {way.against}: {json.dumps(shown)}")
    run.must(name, not row["faults"], f"{row['faults']} texts part from {way.against} at no near-tie")
    run.must(name, not way.alone or row["equal"] == len(places), f"not all texts are equal to {way.against}'s")


def draws(run: Any) -> None:
    """Draws of plain decoding and of trees in float32, each against exact probabilities, a case noted when done."""
    plain, tree = run.needs("ar-exact", "tree32-exact")
    prompt, count = run.prompts[1], run.args.draws
    for name, case in CASES.items():
        laws = {name: joint_law(plain, prompt, case, count, 3)}
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda s, law=laws: check_draws(s, law, prompt, count), (plain, tree)))
        for server, told in zip((plain, tree), found, strict=True):
            run.way(server.name).setdefault("draws", {}).update(told)
            run.say(f"{server.name} draws: {json.dumps(told)}")
            good = told[name]["p"] > LEAST_P and not told[name]["outside_the_law"]
            run.must(server.name, good, f"draws at {name} do not follow the law")


def prefix(run: Any) -> None:
    (server,) = run.needs("tree32")
    run.note("prefix", check_prefix(server, run.prompts))


def retraction(run: Any) -> None:
    """A pool that over-admits, and a server that SGLang's own test switch makes retract every few passes."""
    names = [name for name in ("small-pool", "retract16") if name in run.ready]
    if not names:
        raise LookupError("neither small-pool nor retract16 is ready")

    def check(name: str) -> None:
        found = check_retraction(run.servers[name], run.prompts)
        run.note(f"retraction {name}", found)
        run.must(name, found["shown"], "no request was retracted: nothing is shown")
        run.must(name, found["answers_of_full_length"] == found["requests"], "not all answers are full")
        _empty(run, name, found)

    run.side_by_side([(name, lambda n=name: check(n)) for name in names])


def _empty(run: Any, name: str, found: dict[str, Any]) -> None:
    run.must(name, found["alive"] and found["flushed"] and not found["used_tokens_after"], "slots are still held")


def abort(run: Any) -> None:
    (server,) = run.needs("tree32")
    found = check_abort(server, run.prompts)
    run.note("abort", found)
    run.must("tree32", set(found["endings"]) == {"abort"} and found["well_after"], "not all requests were aborted")
    _empty(run, "tree32", found)


def soak(run: Any) -> None:
    (server,) = run.needs("tree32")
    found = check_soak(server, run.prompts, run.args.soak, lambda: run.is_late("soak"))
    run.note("soak", found)
    run.must("tree32", set(found["endings"]) <= {"stop", "length", "abort"}, "some requests were not answered")
    run.must("tree32", found["endings"].get("abort", 0) > 0, "no request was aborted: that is not shown")
    _empty(run, "tree32", found)


def info(run: Any) -> None:
    """What ``/server_info`` and ``/metrics`` tell of the trees."""
    (server,) = run.needs("tree32")
    told = json.loads(server.get("/server_info"))
    told |= (told.get("internal_states") or [{}])[0]
    keys = ("speculative_algorithm", "speculative_num_draft_tokens", "version", "speculative_dflash_block_size")
    found = {k: v for k, v in told.items() if "speculative_ddtree" in k} | {key: told.get(key) for key in keys}
    lines = server.get("/metrics").decode().splitlines()
    spec = [line.split("{")[0] + " " + line.rsplit(" ", 1)[1] for line in lines if line.startswith("sglang:spec")]
    run.note("server_info", found)
    run.note("metrics", spec)


def auto(run: Any) -> None:
    """A server with budget auto, beside the trees that run; its speeds are taken in turn with theirs."""
    trees = [name for name in ("tree16", "tree32", "tree64") if name in run.ready]
    if not trees:
        raise LookupError("no tree is ready")
    start_auto(run, trees)
    if run.results["budgets"].get("auto_ready"):
        run.ready.add("auto")
        speeds(run, "auto")


PIECES: dict[str, tuple[Callable[[Any], None], float]] = {
    "speeds": (speeds, 90), "texts": (texts, 60), "prefix": (prefix, 20), "abort": (abort, 40), "info": (info, 10),
    "retraction": (retraction, 90), "draws": (draws, 120), "auto": (auto, 150), "soak": (soak, 180),
}  # fmt: skip
"""In the order in which they run, each with the seconds that it may take at most."""
