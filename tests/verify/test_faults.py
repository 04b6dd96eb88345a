"""The fault table: each fault in a live server, found, with the right message; and no alarm without one."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from between import passing, replaying, serving
from live_servers import DRAFTS, VOCAB, ServerProcess

from ddtree.verify import Expectation, Finding, Options, Status, Verdict, Verification
from tiny_models import make_drafter

SHORT = Options(
    answer_timeout_s=30,
    info_timeout_s=10,
    probe_tokens=12,
    long_tokens=160,
    concurrency=2,
    speed_tokens=32,
    speed_tolerance=0.2,
)


def verify(url: str, expectation: Expectation = Expectation(), **options) -> Verdict:  # noqa: B008 - frozen
    return Verification(url, expectation, SHORT, **options).run()


def broken(verdict: Verdict) -> list[Finding]:
    return [finding for finding in verdict.findings if finding.status is Status.violated]


def only(verdict: Verdict, probe: str) -> Finding:
    """The one claim that is violated; every other claim must be none."""
    found = broken(verdict)
    assert [each.probe for each in found] == [probe], verdict.to_json()
    assert verdict.exit_code == 1 and found[0].remedy
    return found[0]


def words(finding: Finding) -> str:
    return " | ".join((finding.claim, *finding.evidence, finding.remedy))


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_no_false_alarm_in_20_runs(server):
    for run in range(20):
        verdict = verify(server.url)
        assert not broken(verdict), (run, broken(verdict))
        assert verdict.status is Status.proven, run
        unproven = {each.probe for each in verdict.findings if each.status is not Status.proven}
        assert unproven == ({"model", "speed"} if run == 0 else set()), run  # the first has no baseline
        assert verdict.measured["tau"] == pytest.approx(2, abs=0.2)


def test_declared_and_effective_agree(server, pair):
    target, drafter = pair
    declared = {
        "algorithm": "ddtree", "budget": VOCAB, "top_k_cap": VOCAB, "block_size": 2, "draft_window": None,
        "draft_temperature": 1,
        "model": str(target), "drafter": f"{drafter}/", "dtype": "float32", "tp": 1,
    }  # fmt: skip
    verdict = verify(server.url, Expectation(engine="native", model_name="tiny", settings=declared, tok_s_floor=1))
    assert verdict.status is Status.proven, verdict.to_json()
    claims = [finding.claim for finding in verdict.findings if finding.status is Status.proven]
    assert {"draft temperature is 1", "draft window is not limited"} <= set(claims)
    assert "one request decodes at least 1 tok/s" in claims
    assert sum("the folder" in claim or f"is the one in {target}" in claim for claim in claims) >= 1


def test_a_draft_temperature_that_the_server_was_started_with(pair):
    with ServerProcess(*pair, *DRAFTS, "--draft-temperature", "0.8") as server:
        verdict = verify(server.url, Expectation(settings={"draft_temperature": 0.8}))
        assert verdict.status is Status.proven, verdict.to_json()
        assert "draft temperature is 0.8" in [each.claim for each in verdict.findings]
        bare = verify(server.url)
        assert bare.status is Status.proven and "draft temperature is 0.8" in [each.claim for each in bare.findings]
        finding = only(verify(server.url, Expectation(settings={"draft_temperature": 1.0})), "settings")
    assert finding.claim == "draft temperature is 1.0" and "/server_info, effective: 0.8" in words(finding)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("budget", 8, "budget (nodes of a tree, or length of a chain) is 8"),
        ("top_k_cap", 4, "top-k cap is 4"),
        ("block_size", 8, "block size is 8"),
        ("draft_window", 64, "draft window is 64"),
        ("draft_temperature", 0.8, "draft temperature is 0.8"),
        ("algorithm", "dflash", "speculation algorithm is dflash"),
        ("model", "owner/other", "model is owner/other"),
        ("tp", 8, "tensor parallelism is 8"),
    ],
)
def test_a_setting_differs(server, name, value, told):
    verdict = verify(server.url, Expectation(settings={name: value}))
    found = [finding for finding in broken(verdict) if finding.probe == "settings"]
    assert [finding.claim for finding in found] == [told]
    assert "/server_info, effective: " in words(found[0])
    if name == "budget":  # found by what rounds do as well
        assert f"the responses tell {VOCAB} nodes a round" in " ".join(words(each) for each in broken(verdict))


def test_speculation_off(pair):
    with ServerProcess(*pair, "--mode", "ar") as server:
        finding = only(verify(server.url), "speculation")
        assert "without one verify call" in words(finding) and "the counter" not in finding.claim
        assert verify(server.url, Expectation(speculates="none")).status is Status.proven


def test_speculation_on_where_none_is_declared(server):
    finding = only(verify(server.url, Expectation(speculates="none")), "speculation")
    assert finding.claim == "speculation is off"


def test_a_drafter_of_random_weights(pair, tmp_path):
    target, _ = pair
    drafter = make_drafter(tmp_path / "random", target, seed=99, block_size=8)
    with ServerProcess(target, drafter, "--budget", "3") as server:  # few, so that chance does not come near the floor
        verdict = verify(server.url)
        finding = next(each for each in broken(verdict) if each.probe == "speculation")
        assert finding.claim == "a round commits at least 1.20 tokens (tau)"
        assert 1 <= verdict.measured["tau"] < 1.2


def test_the_window_flag_is_ignored(pair):
    with ServerProcess(*pair, *DRAFTS, "--draft-window", "64", fault="window") as server:
        finding = only(verify(server.url), "settings")
    assert finding.claim == "draft window is 64"
    assert "/server_info, effective: not limited" in words(finding)
    assert "the options that the process was started with" in words(finding)


def test_another_model_behind_the_same_name(pair, other_pair, port):
    with ServerProcess(*pair, *DRAFTS, port=port) as server:
        assert verify(server.url).status is Status.proven
    with ServerProcess(*other_pair, *DRAFTS, port=port) as server:
        finding = only(verify(server.url), "model")
        assert "another model answers as 'tiny'" in words(finding) and "nats" in words(finding)
        folder = Expectation(settings={"model": str(pair[0])})
        assert {"settings"} <= {each.probe for each in broken(verify(server.url, folder))}
        assert verify(server.url, new_baseline=True).status is Status.proven  # it was changed on purpose


def test_a_server_that_becomes_slow(pair, tmp_path, monkeypatch):
    brake = tmp_path / "slow"
    monkeypatch.setenv("FAULT_FILE", str(brake))
    options = replace(SHORT, speed_tokens=24, speed_tolerance=0.5, long_tokens=0)
    with ServerProcess(*pair, *DRAFTS, fault="slow") as server:

        def slow_down(claim: str, fraction: float) -> None:
            if claim == "decoding is as fast as it was":
                brake.touch()

        assert Verification(server.url, Expectation(), options).run().status is Status.proven
        declared = Expectation(tok_s_floor=20)
        verdict = Verification(server.url, declared, options, tell=slow_down).run()
    found = {finding.claim for finding in broken(verdict)}
    assert found == {"decoding is about as fast as when it was verified", "one request decodes at least 20 tok/s"}


def test_a_restart_during_the_probes(pair, port):
    with ServerProcess(*pair, *DRAFTS, port=port) as first:
        url, later = first.url, []

        def restart(claim: str, fraction: float) -> None:
            if claim == "speculation is as declared":
                first.kill()
                later.append(ServerProcess(*pair, *DRAFTS, port=port))
                assert later[0].url == url

        try:
            finding = only(Verification(url, Expectation(), SHORT, tell=restart).run(), "identity")
        finally:
            for each in later:
                each.kill()
    assert "boot_id was" in words(finding) and "'speculation'" in words(finding)


def test_two_servers_behind_one_address(server, pair):
    with ServerProcess(*pair, *DRAFTS) as second, serving(passing(server.url, second.url)) as url:
        verdict = verify(url)
    assert "several answer behind one address" in words(next(f for f in broken(verdict) if f.probe == "identity"))


def test_the_server_dies_during_the_probes(pair, monkeypatch):
    monkeypatch.setattr("ddtree.verify.run._BACK_AGAIN_S", 1.0)
    with ServerProcess(*pair, *DRAFTS) as server:
        url = server.url

        def kill(claim: str, fraction: float) -> None:
            if claim == "speculation is as declared":
                server.kill()

        verdict = Verification(url, Expectation(), SHORT, tell=kill).run()
    assert "went away during the probe 'speculation'" in words(only(verdict, "identity"))


def test_an_engine_that_hangs_behind_a_live_health(pair, tmp_path, monkeypatch):
    stop = tmp_path / "hang"
    monkeypatch.setenv("FAULT_FILE", str(stop))
    with ServerProcess(*pair, *DRAFTS, fault="hang") as server:
        url = server.url
        stop.touch()
        finding = only(Verification(url, Expectation(), Options(answer_timeout_s=1.5)).run(), "reach")
        assert "/health answers 200" in words(finding) and "the engine hangs" in words(finding)


def test_an_engine_that_hangs_later(pair, tmp_path, monkeypatch):
    stop = tmp_path / "hang"
    monkeypatch.setenv("FAULT_FILE", str(stop))
    with ServerProcess(*pair, *DRAFTS, fault="hang") as server:

        def hang(claim: str, fraction: float) -> None:
            if claim == "decoding is as fast as it was":
                stop.touch()

        options = replace(SHORT, answer_timeout_s=8.0, long_tokens=0, concurrency=1)
        finding = only(Verification(server.url, Expectation(), options, tell=hang).run(), "speed")
        assert "/health answers 200" in words(finding)


def test_a_server_that_drips():
    with serving(lambda method, path, body, headers: (200, b'{"data": [' + b" " * 200), drip_s=0.05) as url:
        verdict = Verification(url, Expectation(), Options(info_timeout_s=0.5)).run()
    assert verdict.exit_code == 3 and verdict.seconds < 5
    assert "was not answered within" in words(verdict.findings[0])


def test_a_proxy_that_replays_answers(server):
    with serving(replaying(server.url)) as url:
        verdict = verify(url)
    claims = {finding.claim for finding in broken(verdict)}
    assert "answers follow from their questions" in claims
    assert "usage counts this prompt and this answer" in claims
    assert "the engine's counters move with the answers" in claims


def test_a_proxy_that_only_passes_on_is_no_fault(server):
    with serving(passing(server.url)) as url:
        assert verify(url).status is Status.proven


def test_the_wrong_key(pair, tmp_path):
    keys: Path = tmp_path / "keys"
    keys.write_text("a-long-enough-key\n")
    with ServerProcess(*pair, *DRAFTS, "--api-key-file", str(keys)) as server:
        for key in (None, "another-key"):
            verdict = verify(server.url, key=key)
            assert verdict.exit_code == 3 and "--api-key-file" in words(verdict.findings[0])
        assert verify(server.url, key="a-long-enough-key").status is Status.proven


def test_nobody_listens(port):
    verdict = verify(f"http://127.0.0.1:{port}")
    assert verdict.exit_code == 3 and "takes no connection" in words(verdict.findings[0])


def test_something_else_answers():
    with serving(lambda method, path, body, headers: (200, b"<html>")) as url:
        verdict = verify(url)
    assert verdict.exit_code == 3 and "did not answer with JSON" in words(verdict.findings[0])


def test_graphs_declared_on_a_cpu(server):
    verdict = verify(server.url, Expectation(graphs=True))
    assert "the engine runs on the CPU" in words(next(each for each in broken(verdict) if each.probe == "graphs"))


def test_another_engine_than_declared(server):
    assert "the pages are those of native" in words(only(verify(server.url, Expectation(engine="sglang")), "reach"))


def test_speculation_that_changes_the_text(pair):
    with ServerProcess(*pair, *DRAFTS, fault="positions") as server:
        verdict = verify(server.url)
    finding = next(each for each in broken(verdict) if each.probe == "lossless")
    assert "first fault" in words(finding) and "where the target says" in words(finding)
