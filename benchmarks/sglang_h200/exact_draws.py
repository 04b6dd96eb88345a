"""Draws at temperature above 0 against exact probabilities, worked out here from plain decoding's logits."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from scipy.stats import chi2_contingency, chisquare
from servers import Server

CASES: dict[str, dict[str, float]] = {
    "T=1 top_k=4": {"temperature": 1.0, "top_k": 4},
    "T=0.8 top_p=0.8": {"temperature": 0.8, "top_p": 0.8},
    "T=1 top_k=8 top_p=0.95 min_p=0.1": {"temperature": 1.0, "top_k": 8, "top_p": 0.95, "min_p": 0.1},
}
TOKENS = 3
"""Drawn a request."""

MISSING = 1e-3
"""Probability that float32 may lose; more means that a server told only a part of its distribution."""

Outcome = tuple[int, ...]
Law = dict[Outcome, float]


def next_law(
    plain: Server, context: list[int], case: dict[str, float], vocabulary: int
) -> tuple[dict[int, float], float]:
    """Probabilities of the next token under SGLang's rules, and how near a token is to the edge of a filter.

    SGLang's rules: temperature first; top-k by rank, top-p by what lies before a token in the whole distribution, min-p
    by the best token's probability, each without renormalising in between. The whole distribution is asked for: what
    only the most likely tokens sum to moves the edge of top-p.

    Raises:
        ValueError: the server told only a part of its distribution.
    """
    asked = {"return_logprob": True, "top_logprobs_num": vocabulary}
    rows = plain.generate(context, asked=asked, max_new_tokens=1).meta["output_top_logprobs"][0]
    told = np.array([row[0] for row in rows], dtype=np.float64)
    if abs(np.exp(told).sum() - 1) > MISSING:
        raise ValueError(f"{len(rows)} tokens were told that sum to {np.exp(told).sum():.4f}: not the whole vocabulary")
    logits = told / case["temperature"]
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order])
    probabilities = weights / weights.sum()
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


def joint_law(
    plain: Server, prompt: list[int], case: dict[str, float], draws: int, vocabulary: int
) -> tuple[Law, float]:
    """Exact probabilities of the next `TOKENS` tokens, rare beginnings left out, and the smallest margin met."""
    law: Law = {(): 1.0}
    margin = np.inf
    for _ in range(TOKENS):
        longer: Law = {}
        often = {beginning: p for beginning, p in law.items() if p * draws >= 1}
        with ThreadPoolExecutor(8) as pool:
            nexts = list(pool.map(lambda b: next_law(plain, prompt + list(b), case, vocabulary), often))
        for (beginning, p), (following, near) in zip(often.items(), nexts, strict=True):
            margin = min(margin, near)
            longer |= {(*beginning, token): p * q for token, q in following.items()}
        law = longer
    return law, float(margin)


def take_draws(server: Server, case: dict[str, float], prompt: list[int], draws: int) -> Counter[Outcome]:
    """How often each outcome was drawn."""
    answers, _ = server.answer_all([prompt] * draws, 16, max_new_tokens=TOKENS, ignore_eos=True, **case)
    return Counter(tuple(answer.token_ids) for answer in answers)


def fit(counts: Counter[Outcome], law: Law) -> dict[str, Any]:
    """Chi-square goodness of fit, and draws that the law rules out; rare outcomes count as one."""
    draws = counts.total()
    often = [key for key, p in law.items() if p * draws >= 5]
    expected = [law[key] * draws for key in often]
    observed = [float(counts[key]) for key in often]
    rest = draws - sum(expected)
    if rest >= 5:
        expected, observed = [*expected, rest], [*observed, draws - sum(observed)]
    else:
        expected = [e * sum(observed) / sum(expected) for e in expected]
    test = chisquare(observed, expected)
    beginnings = {key[:-1] for key in law}
    return {
        "p": float(test.pvalue), "chi_square": float(test.statistic), "outcomes": len(observed), "draws": draws,
        "outside_the_law": sum(n for key, n in counts.items() if key not in law and key[:-1] in beginnings),
        "counts": [[*key, n] for key, n in counts.most_common()],
    }  # fmt: skip


def alike(one: Counter[Outcome], other: Counter[Outcome]) -> float:
    """p of both having drawn from one law, whatever it is; outcomes met less than ten times count as one."""
    both = one + other
    often = [key for key, n in both.items() if n >= 10]
    table = [[counts[key] for key in often] for counts in (one, other)]
    rest = [counts.total() - sum(row) for counts, row in zip((one, other), table, strict=True)]
    if sum(rest):
        table = [[*row, more] for row, more in zip(table, rest, strict=True)]
    return float(chi2_contingency(table).pvalue)
