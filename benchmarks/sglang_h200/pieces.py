"""The pieces of a run, each a function of the `Benchmark`: what it asks of which servers, and what it notes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from auto_server import compare, start_servers
from exact_draws import CASES, alike, fit, joint_law, take_draws
from grammar_checks import check_grammar
from near_ties import MOST_STEPS, STEP, partings, verdict
from pool_checks import check_abort, check_prefix, check_retraction, check_soak
from servers import Answer, Server, figures
from ways import EXACT_MOST, WAYS

from kit import ROOT

IN_TURN = ("ar", "dflash", "tree32", "tree32-split", "tree64", "tree16", "tree8", "chain")
CONCURRENCIES = (1, 4, 16)
LEAST_P = 1e-3
TAU_WITHIN = 0.02
NATIVE = {"bfloat16": {"tree16": 16, "tree32": 32, "tree64": 64}, "float32": {"tree32-exact": 32}}
"""Trees whose tau is held against the native engine's, with their budgets."""


def speeds(run: Any) -> None:
    """In turn, so that a slow minute of the machine meets all of them; the first round is taken before any repeat."""
    names = [name for name in IN_TURN if name in run.ready]
    for name in names:
        run.guarded(name, lambda n=name: run.servers[n].warm_up(run.prompts))
    for _ in range(run.args.repeats):
        for concurrency in CONCURRENCIES:
            batch = {1: run.prompts[::2], 4: run.prompts, 16: run.prompts * 2}[concurrency]
            for name in [name for name in names if name in run.ready]:
                if run.is_late("speeds"):
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
    """From an empty cache, as the way says; then where they part from plain decoding's."""
    names = [name for name in run.args.only if name in run.ready]
    run.side_by_side([(name, lambda n=name: _take(run, n)) for name in names])
    for plain in (True, False):  # plain decoding against itself first: it says how far rounding goes
        some = [name for name in names if (not WAYS[name].against) == plain]
        run.side_by_side([(name, lambda n=name: _compare(run, n)) for name in some])


def _take(run: Any, name: str) -> None:
    """Texts; those of plain decoding in both ways, so that it can be held against itself."""
    server, way, row = run.servers[name], WAYS[name], run.way(name)
    tokens = {"max_new_tokens": 128, "ignore_eos": True} if way.moe else {}
    server.flush()
    cold, cold_s = server.answer_all(run.prompts, 4 if way.texts == "four at a time" else 1, **tokens)
    row["cold"] = figures(cold, cold_s)
    row["cuda_graph"] = b"cuda graph: True" in server.log.read_bytes() if server.log else None
    run.texts[name] = cold
    if not way.against:
        server.flush()
        run.batched[name], _ = server.answer_all(run.prompts, 4, **tokens)
    run.say(f"{name}: {json.dumps(row)}")


def _compare(run: Any, name: str) -> None:
    way, row = WAYS[name], run.way(name)
    against = way.against or name
    if name not in run.texts or against not in run.texts:
        row["texts"] = {"against": against, "not_compared": f"{name} or {against} has no texts"}
        run.must(name, against in run.texts, f"its texts are not compared: {against} has none")
        return
    got = run.texts[name] if way.against else run.batched[name]
    plain = against if WAYS[against].against == "" else WAYS[against].against
    limit = EXACT_MOST if WAYS[plain].is_exact else MOST_STEPS * STEP
    if way.moe and way.against and not WAYS[plain].is_exact:
        # Where two experts are nearly tied, another one is a larger step than rounding: as large as in plain decoding.
        limit = max(limit, run.way(plain)["texts"]["largest_gap"])
    places, parted = partings(run.servers[plain], run.prompts, got, run.texts[against])
    found = verdict(places, parted, limit)
    row["texts"] = {"against": against, "first_differences": places, "limit": limit, **found}
    shown = {key: found[key] for key in ("equal", "near_ties", "faults", "largest_gap", "gaps_in_steps")}
    run.say(f"{name} against {against}: {json.dumps(shown)}")
    if not way.against:
        return  # plain decoding against itself is a measure of rounding, not a check
    run.must(name, not found["faults"], f"{found['faults']} texts part from {against} at no near-tie")
    equal = way.texts != "alone and equal" or found["equal"] == len(places)
    run.must(name, equal, f"not all texts are equal to {against}'s")


def tau(run: Any) -> None:
    """Tokens a round as by the native engine at the same budget, over prompts whose text is the same.

    In float32 all are. In bfloat16 most texts part at a near-tie, and another text has another tau: the native engine's
    own differs by more than `TAU_WITHIN` between bfloat16 and float32.
    """
    wanted = {
        dtype: {n: b for n, b in names.items() if n in run.texts} for dtype, names in NATIVE.items()
    }  # fmt: skip
    if not any(wanted.values()):
        raise LookupError("no tree has texts")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda dtype: _tau(run, dtype, wanted[dtype]), [d for d in wanted if wanted[d]]))


def _tau(run: Any, dtype: str, names: dict[str, int]) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/sglang_h200/native_tau.py"), "--dtype", dtype]
    command += ["--model", str(run.args.target), "--draft", str(run.args.drafter)]
    command += ["--budgets", *map(str, names.values())]
    done = subprocess.run(
        command, input=json.dumps(run.prompts), capture_output=True, text=True, check=False, timeout=200,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the native engine in {dtype}: {done.stderr[-1500:]}")
    native = json.loads(done.stdout.strip().splitlines()[-1])
    for name, budget in names.items():
        own, answers = native[str(budget)], run.texts[name]
        # Without the first token, which comes from reading the prompt.
        sglang = [(int(a.meta["completion_tokens"]) - 1, int(a.meta["spec_verify_ct"])) for a in answers]
        engine = list(zip(own["tokens"], own["rounds"], strict=True))
        same = [i for i, (a, text) in enumerate(zip(answers, own["texts"], strict=True)) if _is_text(a, text)]
        found = {
            "all": _ratio(sglang, engine),
            "same_texts": _ratio([sglang[i] for i in same], [engine[i] for i in same]),
        }
        run.note(f"tau {name}", found | {
            "texts": len(answers), "texts_that_are_the_same": len(same),
            "same_tokens_and_rounds": sum(a == b for a, b in zip(sglang, engine, strict=True)),
        })  # fmt: skip
        if dtype == "float32":
            run.must(name, len(same) == len(answers), f"{len(same)} of {len(answers)} texts are the native engine's")
        ratio = found["same_texts"].get("ratio")
        run.must(name, ratio is not None, "no text is the native engine's: its tau is not compared")
        near = ratio is None or abs(ratio - 1) <= TAU_WITHIN
        run.must(name, near, f"tau {ratio} times the native engine's on the same texts")


def _is_text(answer: Answer, text: list[int]) -> bool:
    """Whether an answer is this text, whose last token may be one that ends texts."""
    got = answer.token_ids
    return got in (text, text[:-1]) and int(answer.meta["completion_tokens"]) == len(text)


def _ratio(sglang: list[tuple[int, int]], engine: list[tuple[int, int]]) -> dict[str, Any]:
    """Tokens a round of both, from pairs of tokens and rounds; nothing of no pairs."""
    if not sglang:
        return {}
    theirs, ours = (sum(t for t, _ in pairs) / sum(r for _, r in pairs) for pairs in (sglang, engine))
    return {"sglang": round(theirs, 3), "native": round(ours, 3), "ratio": round(theirs / ours, 4)}


def draws(run: Any) -> None:
    """Draws of plain decoding and of trees in float32, each against exact probabilities and both against each other."""
    servers = run.needs("ar-exact", "tree32-exact")
    plain, tree = servers
    prompt, count = run.prompts[1], run.args.draws
    vocabulary = int(json.loads((run.args.target / "config.json").read_text())["vocab_size"])
    for name, case in CASES.items():
        law, margin = joint_law(plain, prompt, case, count, vocabulary)
        with ThreadPoolExecutor(2) as pool:
            drawn = list(pool.map(lambda server, c=case: take_draws(server, c, prompt, count), servers))
        for server, counts in zip(servers, drawn, strict=True):
            told = fit(counts, law) | {"margin_of_the_filters": margin}
            if server is tree:
                told["p_against_plain_decoding"] = alike(*drawn)
                run.must(server.name, told["p_against_plain_decoding"] > LEAST_P, f"draws at {name} are not as plain's")
            run.way(server.name).setdefault("draws", {})[name] = told
            run.say(f"{server.name} draws at {name}: {json.dumps({k: v for k, v in told.items() if k != 'counts'})}")
            good = told["p"] > LEAST_P and not told["outside_the_law"]
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
    """What ``/server_info`` tells of the trees, and whether ``/metrics`` and ``meta_info`` count as the answers do."""
    (server,) = run.needs("tree32")
    told = json.loads(server.get("/server_info"))
    told |= (told.get("internal_states") or [{}])[0]
    keys = ("speculative_algorithm", "speculative_num_draft_tokens", "version", "speculative_dflash_block_size")
    run.note(
        "server_info", {k: v for k, v in told.items() if "speculative_ddtree" in k} | {k: told.get(k) for k in keys}
    )
    before = _metrics(server)
    answers, _ = server.answer_all(run.prompts, 4)
    after = _metrics(server)
    tokens, rounds = (sum(int(a.meta[key]) for a in answers) for key in ("completion_tokens", "spec_verify_ct"))
    found = {
        "tokens": tokens, "rounds": rounds, "tokens_a_round": round(tokens / rounds, 3),
        "tokens_received": sum(len(answer.token_ids) for answer in answers),
        "metrics_rounds": after["spec_verify_calls_total"] - before.get("spec_verify_calls_total", 0),
        "metrics_tokens": after["generation_tokens_total"] - before.get("generation_tokens_total", 0),
        "metrics_tokens_a_round_lately": round(after["spec_accept_length"], 3),
    }  # fmt: skip
    run.note("metrics", found)
    # The token that ends a text is counted, but may not be handed out.
    received = tokens - len(answers) <= found["tokens_received"] <= tokens
    same = found["metrics_rounds"] == rounds and found["metrics_tokens"] == tokens and received
    run.must("tree32", same, "/metrics counts other rounds or tokens than the answers tell")
    lengths = [(a.meta["spec_accept_length"], a.meta["completion_tokens"] / a.meta["spec_verify_ct"]) for a in answers]
    run.must("tree32", all(abs(x - y) < 1e-6 for x, y in lengths), "meta_info tells other accepted lengths")


def _metrics(server: Server) -> dict[str, float]:
    """SGLang's numbers by name, without prefix and labels."""
    lines = [line for line in server.get("/metrics").decode().splitlines() if line.startswith("sglang:")]
    return {line.split("{")[0].removeprefix("sglang:"): float(line.rsplit(" ", 1)[1]) for line in lines}


def auto(run: Any) -> None:
    """Servers with budget auto, beside fixed widths."""
    compare(run, start_servers(run), "auto")


def experts(run: Any) -> None:
    """Distinct experts by tree size, as the server printed them."""
    (server,) = run.needs("moe-count")
    server.answer_all(run.prompts, 1, max_new_tokens=128, ignore_eos=True)
    lines = server.said().splitlines()
    starts = [place for place, line in enumerate(lines) if "distinct experts by budget" in line]
    if not starts:
        raise LookupError("the server printed no table")
    rows = [line for line in lines[starts[-1] : starts[-1] + 14] if line.startswith("|") or "distinct" in line]
    run.note("experts", rows)
    counts = [float(row.split("|")[2]) for row in rows[3:]]
    run.must("moe-count", counts == sorted(counts) and counts[0] == 6, "not the six of one row, or not rising")


def ranks(run: Any) -> None:
    """Rounds whose trees the ranks compared; a difference would have ended the server."""
    names = [name for name in run.args.only if "-16" in name and name in run.ready]
    if not names:
        raise LookupError("no tree over several ranks is ready")
    for name in names:
        told = [line for line in run.servers[name].said().splitlines() if "rounds alike on" in line]
        run.note(f"ranks {name}", told[-1:])
        run.must(name, bool(told) and run.servers[name].alive(), "the ranks did not compare their trees")


def grammar(run: Any) -> None:
    """Answers under a schema and a regular expression: as by plain decoding, and of that form."""
    plain, tree = run.needs("ar-grammar", "grammar16")
    found = check_grammar(plain, tree, run.prompts)
    run.note("grammar", found)
    run.must("grammar16", not found["misshapen"], f"{found['misshapen']} answers are not of the form asked for")
    run.must("grammar16", not found["faults"], f"{found['faults']} answers part at no near-tie")


PIECES: dict[str, tuple[Callable[[Any], None], float]] = {
    "speeds": (speeds, 400), "texts": (texts, 230), "prefix": (prefix, 30), "tau": (tau, 210), "info": (info, 30),
    "retraction": (retraction, 120), "abort": (abort, 60), "draws": (draws, 300), "grammar": (grammar, 60),
    "experts": (experts, 60), "ranks": (ranks, 10), "auto": (auto, 560), "soak": (soak, 240),
}  # fmt: skip
"""Each with the seconds that it may take at most."""
