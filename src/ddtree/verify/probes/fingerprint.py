"""Is the model the one that was verified before? The same few texts must be continued with the same likelihoods."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree.verify.answer import Answer, Order
from ddtree.verify.config_hash import config_sha256
from ddtree.verify.finding import Finding, proven, unknown, violated
from ddtree.verify.http_client import Refused
from ddtree.verify.prompts import FINGERPRINT
from ddtree.verify.session import Session

LARGEST_DRIFT_NATS = 0.5
"""Other kernels, other batches and other quantised caches move log-probabilities by less; other weights by more."""

_TOKENS = 8
_TOP = 5


def probe_fingerprint(session: Session) -> Iterator[Finding]:
    """Takes the fingerprint, and holds it against the baseline's. Raises CheckFailed."""
    for prompt in FINGERPRINT:
        answer = _ask(session, prompt)
        session.prompt_tokens[prompt] = answer.prompt_tokens
        if answer.chances and answer.chances[0].top:
            session.fingerprint[prompt] = dict(answer.chances[0].top)
        else:
            session.fingerprint[prompt] = {answer.text: 0.0}
    yield from _configs(session)
    baseline = session.baseline
    claim = "the model says what it said when it was verified"
    if baseline is None or not baseline.fingerprint:
        words = "there is no verified run of this address to compare with; this one becomes it if all is proven"
        yield unknown("model", claim, words, is_required=False)
        return
    counts = [p for p in FINGERPRINT if session.prompt_tokens[p] != baseline.prompt_tokens.get(p)]
    if counts:
        yield violated(
            "model",
            claim,
            f"{len(counts)} of {len(FINGERPRINT)} texts have another number of tokens than on {baseline.verified_at}",
            remedy=_remedy(session),
        )
        return
    others, worst, is_text = _compare(session.fingerprint, baseline.fingerprint)
    if is_text:
        seen = f"{len(FINGERPRINT) - others} of {len(FINGERPRINT)} texts are continued as on {baseline.verified_at}"
        is_other = others > len(FINGERPRINT) // 2  # a near-tie may change one of them
    else:
        seen = f"log-probabilities of next tokens are off by at most {worst:.3f} nats from {baseline.verified_at}"
        is_other = worst > LARGEST_DRIFT_NATS
    if is_other:
        yield violated("model", claim, seen, remedy=_remedy(session))
    else:
        yield proven("model", claim, seen)


def _remedy(session: Session) -> str:
    name = session.adapter.model_name
    return f"another model answers as {name!r}: check the weights; if it was changed on purpose, --new-baseline"


def _ask(session: Session, prompt: str) -> Answer:
    try:
        return session.adapter.answer(Order(prompt, _TOKENS, top_logprobs=_TOP))
    except Refused:  # log-probabilities are refused beside some speculation
        return session.adapter.answer(Order(prompt, _TOKENS))


def _compare(now: dict[str, dict[str, float]], then: dict[str, dict[str, float]]) -> tuple[int, float, bool]:
    """How many prompts go on otherwise, the largest drift in nats, and whether there are texts only."""
    worst, others, is_text = 0.0, 0, False
    for prompt, chances in now.items():
        before = then.get(prompt, {})
        if len(chances) == 1 or len(before) == 1:
            is_text = True
            others += not chances.keys() & before.keys()
            continue
        best = max(before, key=before.__getitem__, default="")
        shared = chances.keys() & before.keys()
        drift = max((abs(chances[token] - before[token]) for token in shared), default=float("inf"))
        worst = max(worst, drift if best in chances else float("inf"))
    return others, worst, is_text


def _configs(session: Session) -> Iterator[Finding]:
    """The hash of `config.json` that the engine read, against the folder, where it is on this machine."""
    for weights, name in (("model", "model_config_sha256"), ("drafter", "drafter_config_sha256")):
        folder = session.expectation.settings.get(weights)
        found = session.effective.settings.get(name)
        wanted = config_sha256(folder) if isinstance(folder, str) else None
        if wanted is None or found is None:
            continue
        claim = f"the {weights} is the one in {folder}"
        if wanted == found:
            yield proven("model", claim, f"config.json has SHA-256 {wanted[:12]}...")
        else:
            yield violated(
                "model",
                claim,
                f"the engine read a config.json of SHA-256 {found[:12]}..., the folder's is {wanted[:12]}...",
                remedy="start the server again: the folder was changed, or it serves another one",
            )
