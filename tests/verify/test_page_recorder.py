"""Pages are recorded as a server gave them, and nothing of its machine with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from between import serving
from live_servers import DRAFTS
from test_recorded_pages import ask_as_then, replaying

from ddtree.verify import Expectation, Options, Verification

OPTIONS = Options(probe_tokens=12, long_tokens=160, baseline=False)


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import page_recorder

    return page_recorder


@pytest.mark.parametrize(("budget", "expected"), [(DRAFTS[1], "proven"), (7, "violated")])
def test_what_is_recorded_leads_to_the_same_verdict(recorder, server, pair, tmp_path, monkeypatch, budget, expected):
    target, drafter = map(str, pair)
    expectation = Expectation(engine="native", settings={"budget": int(budget), "model": target}, origin="the test")
    renamed = {target: "/models/target", drafter: "/models/drafter"}
    verdict = recorder.record(server.url, expectation, OPTIONS, tmp_path / "page.json", "a test", renamed)
    assert verdict.status.value == expected
    text = (tmp_path / "page.json").read_text()
    assert str(tmp_path.parents[1]) not in text and "/models/target" in text
    kept = json.loads(text)
    ask_as_then(kept, monkeypatch)
    with serving(replaying(kept)) as url:
        again = Verification(url, Expectation(**kept["expectation"]), Options(**kept["options"])).run()
    assert again.status.value == expected
    assert {each.claim for each in again.findings if each.status.value == "violated"} == {
        each.claim for each in verdict.findings if each.status.value == "violated"
    }


@pytest.mark.parametrize("folder", ["root", "home/someone", "tmp"])
def test_what_names_the_machine_is_left_out(recorder, tmp_path, folder):
    info = {
        "internal_states": [{"host": "10.0.0.7", "api_key": "k-1", "last_gen_throughput": 812.5, "tp_size": 1}],
        "log_file": f"/{folder}/logs/a.log",
        "ssl_keyfile": "/etc/key.pem",
        "speculative_algorithm": None,
    }
    pages = {"/server_info": info, "/v1/models": {"data": [{"id": "m"}]}}

    def answer(method, path, body, headers):
        return (200, json.dumps(pages[path]).encode()) if path in pages else (500, b"{}")

    with serving(answer) as url:
        recorder.record(url, Expectation(), OPTIONS, tmp_path / "page.json", "a test", {})
    text = (tmp_path / "page.json").read_text()
    assert not any(word in text for word in ("10.0.0.7", "k-1", f"/{folder}/logs", "812.5", "/etc/key.pem"))
    assert "(a path)" in text and '\\"tp_size\\": 1' in text
