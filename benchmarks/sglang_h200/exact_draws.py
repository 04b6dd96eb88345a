"""Draws at temperature above 0 against exact probabilities, worked out here from plain decoding's logits."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from scipy.stats import chisquare
from servers import Server

LOGPROBS = 400
CASES: dict[str, dict[str, float]] = {
    "T=1 top_k=4": {"temperature": 1.0, "top_k": 4},
    "T=0.8 top_p=0.8": {"temperature": 0.8, "top_p": 0.8},
    "T=1 top_k=8 top_p=0.95 min_p=0.1": {"temperature": 1.0, "top_k": 8, "top_p": 0.95, "min_p": 0.1},
}
Law = dict[tuple[int, ...], float]


def next_law(plain: Server, context: list[int], case: dict[str, float]) -> tuple[dict[int, float], float]:
    """Probabilities of the next token under SGLang's rules, and how near a token is to the edge of a filter.

    SGLang's rules: temperature first; top-k by rank, top-p by what lies before a token in the whole distribution, min-p
    by the best token's probability, each without renormalising in between.
    """
    asked = {"return_logprob": True, "top_logprobs_num": LOGPROBS}
    meta = plain.generate(context, asked=asked, max_new_tokens=1).meta
    rows = meta["output_top_logprobs"][0]
    logits = np.array([row[0] for row in rows]) / case["temperature"]
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order])
    rest = max(0.0, 1 - float(np.exp([row[0] for row in rows]).sum())) if case["temperature"] == 1 else 0.0
    probabilities = weights / (weights.sum() + rest)
    before = probabilities.cumsum() - probabilities
    top_k = int(case.get("top_k", len(order)))
    kept = np.arange(len(order)) < top_k
    margin = np.inf
    if top_k < len(order):
        margin = min(margin, float(np.log(probabilities[top_k - 1] / probabilities[top_k])))
    if "top_p" in case:
        kept &= before <= case["top_p"]
        margin = min(margin, float(np.abs(before[1:top_k] - case["top_p"]).min()))
    if "min_p" in case:
        kept &= probabilities >= probabilities[0] * case["min_p"]
        margin = min(margin, float(np.abs(np.log(probabilities / probabilities[0] / case["min_p"])).min()))
    left = probabilities * kept / (probabilities * kept).sum()
    tokens = [int(rows[i][1]) for i in order]
    return {token: float(p) for token, p in zip(tokens, left, strict=True) if p > 0}, margin


def joint_law(plain: Server, prompt: list[int], case: dict[str, float], draws: int, tokens: int) -> tuple[Law, float]:
    """Exact probabilities of the next ``tokens`` tokens, rare beginnings left out, and the smallest margin met."""
    law: Law = {(): 1.0}
    margin = np.inf
    for _ in range(tokens):
        longer: Law = {}
        often = {beginning: p for beginning, p in law.items() if p * draws >= 1}
        with ThreadPoolExecutor(8) as pool:
            nexts = list(pool.map(lambda b: next_law(plain, prompt + list(b), case), often))
        for (beginning, p), (following, near) in zip(often.items(), nexts, strict=True):
            margin = min(margin, near)
            longer |= {(*beginning, token): p * q for token, q in following.items()}
        law = longer
    return law, float(margin)


def check_draws(server: Server, laws: dict[str, tuple[Law, float]], prompt: list[int], draws: int) -> dict[str, Any]:
    """Chi-square goodness of fit of a server's draws, a case at a time."""
    told: dict[str, Any] = {}
    for name, (law, margin) in laws.items():
        answers, _ = server.answer_all([prompt] * draws, 16, max_new_tokens=3, ignore_eos=True, **CASES[name])
        counts = Counter(tuple(answer.token_ids) for answer in answers)
        often = [key for key, p in law.items() if p * draws >= 5]
        expected = [law[key] * draws for key in often]
        observed = [float(counts[key]) for key in often]
        rest = draws - sum(expected)
        if rest >= 5:
            expected, observed = [*expected, rest], [*observed, draws - sum(observed)]
        else:
            expected = [e * sum(observed) / sum(expected) for e in expected]
        test = chisquare(observed, expected)
        impossible = sum(n for key, n in counts.items() if key not in law and key[:-1] in {k[:-1] for k in law})
        told[name] = {
            "p": float(test.pvalue), "chi_square": float(test.statistic), "outcomes": len(observed), "draws": draws,
            "outside_the_law": impossible, "margin_of_the_filters": margin,
        }  # fmt: skip
    return told
