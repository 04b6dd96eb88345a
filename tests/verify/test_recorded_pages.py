"""Pages of real engines, recorded by `benchmarks/page_recorder.py`, lead to the same verdict again."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from between import serving

from ddtree.verify import Expectation, Options, Verification

PAGES = sorted((Path(__file__).parent / "pages").glob("*.json"))


def replaying(kept):
    """Each path answers what it answered then, in the order of then."""
    waiting, lock = {}, threading.Lock()
    for step in kept["steps"]:
        waiting.setdefault((step["method"], step["path"]), []).append(step)

    def answer(method, path, body, headers):
        with lock:
            steps = waiting.get((method, path))
            assert steps, f"{method} {path} was not asked then, or less often"
            step = steps.pop(0) if len(steps) > 1 else steps[0]
        return step["status"], kept["contents"][step["content"]].encode()

    return answer


@pytest.mark.skipif(not PAGES, reason="no recorded pages are in tests/verify/pages")
@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_the_verdict_is_the_same(file, monkeypatch):
    # A recording cannot follow what is drawn anew; that this is found is tested with the other proxies.
    monkeypatch.setattr("ddtree.verify.probes.answers.most_tokens", lambda: 24)
    kept = json.loads(file.read_text(encoding="utf-8"))
    with serving(replaying(kept)) as url:
        verdict = Verification(url, Expectation(**kept["expectation"]), Options(**kept["options"])).run()
    assert verdict.engine == kept["engine"]
    assert verdict.status.value == kept["verdict"], verdict.to_json()
    found = {f"{each.probe}: {each.claim}" for each in verdict.findings if each.status.value == "violated"}
    assert found == set(kept["violated"])


def test_a_recording_played_again_is_found(monkeypatch):
    """It follows neither the questions nor the lengths that are drawn anew; here each is drawn shorter than then."""
    kept = json.loads(next(file for file in PAGES if file.stem == "native_right").read_text(encoding="utf-8"))
    monkeypatch.setattr("ddtree.verify.probes.answers.most_tokens", lambda: 8)
    with serving(replaying(kept)) as url:
        verdict = Verification(url, Expectation(**kept["expectation"]), Options(**kept["options"])).run()
    told = {each.claim: each.status.value for each in verdict.findings if each.probe == "answers"}
    assert told["usage counts this prompt and this answer"] == "violated"
    assert told["answers follow from their questions"] == "unknown"
