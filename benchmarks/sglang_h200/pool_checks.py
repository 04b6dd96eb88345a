"""What a server does with its K/V slots: cached prefixes, aborted requests, a pool too small for all."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from servers import Server, figures


def check_prefix(server: Server, prompts: list[list[int]]) -> dict[str, Any]:
    """The same prompts one at a time with an empty and with a filled cache: tau must not fall."""
    server.flush()
    some = prompts[::3]
    cold, cold_s = server.answer_all(some, 1)
    warm, warm_s = server.answer_all(some, 1)
    return {
        "tau_cold": figures(cold, cold_s)["tau"],
        "tau_warm": figures(warm, warm_s)["tau"],
        "cached_tokens": sum(int(answer.meta.get("cached_tokens") or 0) for answer in warm),
        "prompt_tokens": sum(len(prompt) for prompt in some),
    }


def check_abort(server: Server, prompts: list[list[int]]) -> dict[str, Any]:
    """Twelve long requests, all aborted on their way; then the pool must be empty and the server well."""
    endings: list[str] = []

    def ask(prompt: list[int]) -> None:
        answer = server.generate(prompt, max_new_tokens=3000, ignore_eos=True)
        endings.append((answer.meta.get("finish_reason") or {}).get("type", "none"))

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts[:12]]
    for thread in threads:
        thread.start()
    time.sleep(0.7)
    server.post("/abort_request", {"rid": "", "abort_all": True})
    for thread in threads:
        thread.join(60)
    after = server.generate(prompts[0])
    return {"endings": sorted(endings), "well_after": len(after.token_ids) > 0} | emptied(server)


def check_retraction(server: Server, prompts: list[list[int]]) -> dict[str, Any]:
    """Sixteen requests at once, some retracted on their way: all are answered in full, and nothing stays held.

    ``shown`` is false where nothing was retracted: then the check has said nothing.
    """
    length, before = 220, _retractions(server)
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(lambda p: server.generate(p, timeout=80, max_new_tokens=length, ignore_eos=True), prompts[:16])
        )
    retracted = _retractions(server) - before
    return {
        "shown": retracted > 0,
        "retractions_logged": retracted,
        "answers_of_full_length": sum(len(answer.token_ids) == length for answer in answers),
        "requests": len(answers),
        "leaks_logged": server.said().count("memory leak"),
    } | emptied(server)


def check_soak(server: Server, prompts: list[list[int]], count: int, is_late: Callable[[], bool]) -> dict[str, Any]:
    """Requests of mixed lengths, greedy and sampled, 24 at a time, every tenth aborted on its way."""
    endings: Counter[str] = Counter()

    def ask(number: int) -> None:
        if is_late():
            endings["left out"] += 1
            return
        draw, rid = random.Random(number), f"soak-{number}"
        sampling = {"max_new_tokens": draw.choice((8, 32, 128, 384)), "temperature": draw.choice((0, 0.8))}
        if number % 10 == 0:
            late = threading.Timer(draw.uniform(0.02, 0.4), server.post, ("/abort_request", {"rid": rid}))
            late.start()
        try:
            answer = server.generate(draw.choice(prompts), timeout=60, asked={"rid": rid}, **sampling)
            endings[(answer.meta.get("finish_reason") or {}).get("type", "none")] += 1
        except OSError as error:
            endings[type(error).__name__] += 1

    begun = time.monotonic()
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(ask, range(count)))
    return {
        "requests": count - endings["left out"],
        "endings": dict(endings),
        "seconds": round(time.monotonic() - begun, 1),
        "leaks_logged": server.said().count("memory leak"),
    } | emptied(server)


def _retractions(server: Server) -> int:
    log = server.said()
    return log.count("Retract requests") + log.count("Testing retraction")


def emptied(server: Server) -> dict[str, Any]:
    """Flush the cache; what is then still held was lost."""
    flushed = server.flush()
    used, until = server.used_tokens(), time.monotonic() + 4
    while used and time.monotonic() < until:
        time.sleep(0.3)
        used = server.used_tokens()
    return {"flushed": flushed, "used_tokens_after": used, "alive": server.alive()}
