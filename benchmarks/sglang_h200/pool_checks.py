"""What a server does with its K/V slots: cached prefixes, aborted requests, a pool too small for all."""

from __future__ import annotations

import threading
import time
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


def check_small_pool(server: Server, prompts: list[list[int]]) -> dict[str, Any]:
    """More requests at once than the pool holds: some are retracted, all are answered in full."""
    length = 220
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(lambda p: server.generate(p, timeout=90, max_new_tokens=length, ignore_eos=True), prompts[:16])
        )
    log = server.log.read_text(errors="replace") if server.log else ""
    return {
        "answers_of_full_length": sum(len(answer.token_ids) == length for answer in answers),
        "requests": len(answers),
        "retractions_logged": log.count("Retract requests"),
        "leaks_logged": log.count("memory leak"),
    } | emptied(server)


def emptied(server: Server) -> dict[str, Any]:
    """Flush the cache; what is then still held was lost."""
    flushed = server.flush()
    used, until = server.used_tokens(), time.monotonic() + 4
    while used and time.monotonic() < until:
        time.sleep(0.3)
        used = server.used_tokens()
    return {"flushed": flushed, "used_tokens_after": used, "alive": server.alive()}
