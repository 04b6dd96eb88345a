"""Pages of real engines, recorded by `benchmarks/page_recorder.py`, lead to the same verdict again."""

from __future__ import annotations

import json
import re
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


def ask_as_then(kept, monkeypatch):
    """A recording cannot follow what is drawn anew; that this is found is tested with the other proxies."""
    drawn = kept.get("drawn", {})
    tokens = iter(drawn.get("most_tokens", ()))
    monkeypatch.setattr("ddtree.verify.probes.answers.most_tokens", lambda: next(tokens, 24))
    if "_numbers" in drawn:
        numbers = iter(drawn["_numbers"])
        monkeypatch.setattr("ddtree.verify.probes.answers._numbers", lambda: next(numbers))


@pytest.mark.skipif(not PAGES, reason="no recorded pages are in tests/verify/pages")
@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_the_verdict_is_the_same(file, monkeypatch):
    kept = json.loads(file.read_text(encoding="utf-8"))
    ask_as_then(kept, monkeypatch)
    with serving(replaying(kept)) as url:
        verdict = Verification(url, Expectation(**kept["expectation"]), Options(**kept["options"])).run()
    assert verdict.engine == kept["engine"]
    assert verdict.status.value == kept["verdict"], verdict.to_json()
    found = {f"{each.probe}: {each.claim}" for each in verdict.findings if each.status.value == "violated"}
    assert found == set(kept["violated"])


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_a_recording_is_of_the_case_that_it_is_named_for(file):
    """What ran as declared was proven, and every fault was found; that a replay finds it again is tested above."""
    kept = json.loads(file.read_text(encoding="utf-8"))
    is_right = file.stem.endswith("_right") or file.stem == "vllm_ngram"
    assert kept["verdict"] == ("proven" if is_right else "violated")
    assert bool(kept["violated"]) != is_right


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_a_recording_tells_nothing_of_its_machine(file):
    text = file.read_text(encoding="utf-8")
    assert not re.findall(r"(?<![\w.])/(?:home|root|tmp|work|Users)/[\w./-]*", text)
    kept = json.loads(text)
    for step in kept["steps"]:
        if step["path"] in ("/server_info", "/get_server_info") and step["status"] == 200:
            info = json.loads(kept["contents"][step["content"]])
            for page in (info, *info.get("internal_states", ())):
                private = [name for name in page if re.match("api_key|admin_api|host$|ssl_", name)]
                assert not any(page[name] for name in private), private


def test_a_recording_played_again_is_found(monkeypatch):
    """It follows neither the questions nor the lengths that are drawn anew; here each is drawn shorter than then."""
    kept = json.loads(next(file for file in PAGES if file.stem == "native_right").read_text(encoding="utf-8"))
    monkeypatch.setattr("ddtree.verify.probes.answers.most_tokens", lambda: 8)
    with serving(replaying(kept)) as url:
        verdict = Verification(url, Expectation(**kept["expectation"]), Options(**kept["options"])).run()
    told = {each.claim: each.status.value for each in verdict.findings if each.probe == "answers"}
    assert told["usage counts this prompt and this answer"] == "violated"
    assert told["answers follow from their questions"] == "unknown"
