"""What stands beside a drafter is told, and holds a server to it where it is of the same weights and the same draft."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from between import serving
from live_servers import DRAFTS, VOCAB, ServerProcess
from test_faults import SHORT, broken, words
from test_recorded_pages import PAGES, ask_as_then, replaying

from ddtree.cli.main import run
from ddtree.cli.verify_target import Declared, resolve
from ddtree.deploy import to_deployment
from ddtree.verify import Expectation, Finding, Options, Status, Verdict, Verification, from_deployment
from ddtree.verify.host_process import HostProcess
from ddtree.verify.probes import PROBES
from train.pieces import write_prompts

OPTIONS = replace(SHORT, probe_tokens=32, baseline=False)
FLOOR = "a round commits at least {:.2f} tokens (tau)"


def promise(folder: Path, sha256: str | None = None, **tau: dict[str, float]) -> None:
    """Write the file as training does."""
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    told = {
        "drafter_sha256": sha256 or found,
        "measured": "float32",
        "n_prompts": dict.fromkeys(tau, 9),
        "tau": tau,
    }
    (folder / "expected_tau.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def own(pair, tmp_path_factory):
    """A server that always reaches tau 2, and the folder of its drafter, which nobody else uses."""
    target, drafter = pair
    folder = shutil.copytree(drafter, tmp_path_factory.mktemp("own") / "drafter")
    with ServerProcess(target, folder, *DRAFTS) as running:
        yield running.url, folder


def verify(own, expectation: Expectation = Expectation(), name: str | None = None, **options) -> Verdict:  # noqa: B008 - frozen
    """The speculation probe alone, within a whole run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddtree.verify.run.PROBES", {"speculation": PROBES["speculation"]})
        return Verification(own[0], expectation, replace(OPTIONS, **options), name=name).run()


def tau_of(verdict: Verdict) -> Finding:
    return next(each for each in verdict.findings if each.claim.endswith("tokens (tau)"))


def test_what_training_keeps_is_what_verify_tells(own, pair, tmp_path):
    prompts = write_prompts(tmp_path / "exam.jsonl", ["abc", "de"])
    command = ["train", "evaluate", "--model", pair[0], "--draft", own[1], "--prompts", prompts, "--keep"]
    flags = ["--budgets", f"chain,{VOCAB}", "--max-new-tokens", "16", "--device", "cpu", "--dtype", "float32"]
    assert run([*map(str, command), *flags]) == 0
    kept = json.loads((own[1] / "expected_tau.json").read_text())["tau"]["exam"][str(VOCAB)]
    verdict = verify(own)
    assert verdict.status is Status.proven, verdict.to_json()
    told = f"expected tau of this drafter, a tree of {VOCAB}: {kept:.2f} (exam)"
    assert tau_of(verdict).evidence[0] == f"tau {verdict.measured['tau']:.2f} over 6 answers; {told}"
    assert tau_of(verdict).claim == FLOOR.format(1.2), "half of it would be less"


@pytest.mark.parametrize(("least", "floor"), [(3.0, 1.5), (3.8, 1.9), (3.96, 1.98), (9.0, 2.0)])
def test_the_server_is_held_to_half_of_the_least_and_at_most_to_2(own, least, floor):
    """It reaches 31 tokens in 16 rounds: the first of 32 comes from prefill, and the last round has room for one."""
    promise(own[1], maths={"8": 9.5, "16": 9.6, str(VOCAB + 1): 9.9}, chat={"8": least - 1, "16": least})
    verdict = verify(own)
    assert verdict.measured["tau"] == pytest.approx(31 / 16, abs=1e-3)
    finding = tau_of(verdict)
    assert finding.claim == FLOOR.format(floor) and f"a tree of 16: 9.60 (maths), {least:.2f} (chat)" in words(finding)
    assert broken(verdict) == ([] if floor < 31 / 16 else [finding])
    assert "by what the drafter's folder promises" in words(finding)


def test_a_declared_floor_wins(own):
    promise(own[1], chat={"16": 5.0})
    declared = Expectation(tau_floor=1.2, is_tau_floor_declared=True)
    verdict = verify(own, declared)
    assert verdict.status is Status.proven and tau_of(verdict).claim == FLOOR.format(1.2)
    assert "5.00 (chat)" in words(tau_of(verdict)) and "declared by command line" in words(tau_of(verdict))


DATA = {
    "engine": {"kind": "native"},
    "model": {"path": "/models/target"},
    "drafter": {"path": "/models/drafter"},
    "speculation": {"algorithm": "ddtree", "budget": 8},
    "service": {"name": "x", "port": 8000},
}


@pytest.mark.parametrize("given", [None, 0.8, 1])
def test_a_flag_and_a_file_declare_the_draft_temperature(tmp_path, given):
    speculation = DATA["speculation"] | ({} if given is None else {"draft_temperature": given})
    by_file = from_deployment(to_deployment(DATA | {"speculation": speculation}, folder=tmp_path), "x.toml")
    by_flag = resolve("http://x", None, Declared(draft_temperature=given)).expectation
    for found in (by_file, by_flag):
        assert found.settings.get("draft_temperature") == given


def test_a_flag_and_a_file_declare_it(tmp_path):
    for floor in (None, 1.2, 3.0):
        expect = {} if floor is None else {"expect": {"tau_floor": floor}}
        by_file = from_deployment(to_deployment(DATA | expect, folder=tmp_path), "x.toml")
        by_flag = resolve("http://x", None, Declared(tau_floor=floor)).expectation
        for found in (by_file, by_flag):
            assert (found.tau_floor, found.is_tau_floor_declared) == (floor or 1.2, floor is not None)


def test_the_promise_of_other_weights_is_told_and_not_used(own):
    promise(own[1], sha256="0" * 64, chat={"16": 5.0})
    verdict = verify(own)
    assert verdict.status is Status.proven and tau_of(verdict).claim == FLOOR.format(1.2)
    assert "it is of weights 000000000000, the folder holds" in words(tau_of(verdict))


@pytest.mark.parametrize(
    ("row", "declared", "options", "told"),
    [
        ({str(VOCAB + 1): 5.0, "chain": 8.0}, {}, {}, "5.00 to 8.00 with other drafts than this one"),
        ({"16": 5.0}, {"budget": "auto"}, {}, "5.00 to 5.00 with other drafts than this one"),
        ({}, {}, {}, "expected tau of this drafter is not known"),
        ({"16": 5.0}, {"draft_window": 64}, {}, "no floor here: it was measured without a draft window"),
        ({"16": 5.0}, {"block_size": 4}, {}, "no floor here: it was measured with blocks of 2 tokens"),
        ({"16": 5.0}, {"draft_temperature": 0.8}, {}, "no floor here: it was measured at the draft temperature 1.0"),
        ({"16": 5.0}, {}, {"probe_tokens": 12}, "no floor here: answers of 12 tokens are short"),
    ],
)
def test_a_promise_of_other_drafts_is_no_floor(own, row, declared, options, told):
    promise(own[1], chat=row)
    finding = tau_of(verify(own, Expectation(settings=declared), **options))
    assert finding.status is Status.proven and finding.claim == FLOOR.format(1.2) and told in words(finding)


@pytest.mark.parametrize(
    ("measured", "own_temperature", "declared", "is_floor"),
    [
        (0.8, 0.8, {"draft_temperature": 0.8}, True),
        (0.8, 0.8, {"draft_temperature": 0.8000000119}, True),
        (0.8, 0.8, {"draft_temperature": 1}, False),
        (0.8, 0.8, {"algorithm": "dflash", "draft_temperature": 1}, True),
        (None, 0.7, {"draft_temperature": 1}, True),
        (None, 0.7, {"draft_temperature": 0.7}, True),
        (None, 0.7, {"draft_temperature": 0.8}, False),
        (None, None, {"draft_temperature": 1}, True),
        (None, None, {"draft_temperature": 0.8}, False),
        (0.8, None, {"draft_temperature": 0.8}, True),
    ],
)
def test_trees_are_held_at_the_measured_draft_temperature_and_at_the_drafters_own(
    own, measured, own_temperature, declared, is_floor
):
    """Files that say nothing are of 1. What is declared decides here, not what the server was started with."""
    promise(own[1], chat={"16": 3.0, "chain": 3.0})
    kept = own[1] / "expected_tau.json"
    if measured is not None:
        kept.write_text(json.dumps(json.loads(kept.read_text()) | {"draft_temperature": measured}))
    file = own[1] / "config.json"
    config = file.read_text()
    dflash = json.loads(config)["dflash_config"] | (
        {} if own_temperature is None else {"draft_temperature": own_temperature}
    )
    file.write_text(json.dumps(json.loads(config) | {"dflash_config": dflash}))
    try:
        finding = tau_of(verify(own, Expectation(settings=declared)))
    finally:
        file.write_text(config)
    assert finding.claim == FLOOR.format(1.5 if is_floor else 1.2)
    assert (f"at the draft temperature {measured or 1.0}" in words(finding)) == (not is_floor)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"drafter_sha256": "0", "tau": {"chat": {"16": "NaN"}}}', None])
def test_a_damaged_or_absent_file_is_no_alarm(own, content):
    file = own[1] / "expected_tau.json"
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content)
    verdict = verify(own)
    assert verdict.status is Status.proven and tau_of(verdict).claim == FLOOR.format(1.2)
    assert ("is damaged" in words(tau_of(verdict))) == (content is not None)


def test_a_folder_of_this_machine_says_nothing_of_another(own):
    promise(own[1], chat={"16": 5.0})
    verdict = verify(own, name="http://elsewhere:8000")
    assert verdict.status is Status.proven and "expected" not in words(tau_of(verdict))
    for name in ("/usr/bin/ssh", "ssh", "ssh: /run/control [mux]"):
        assert HostProcess(1, 1, (name, "-N")).is_ssh
    for name in ("/usr/bin/python3", "sshd-like", "/opt/ssh/python"):
        assert not HostProcess(1, 1, (name,)).is_ssh


THEIR_DRAFTER = Path(__file__).parents[2] / "examples" / "kits" / "demo-pair" / "data" / "drafter"
"""The small files of the drafter that those servers ran with, as a kit of that time has kept them."""
FLOORS = {
    "native_gpu_graphs_off": 1.844, "sglang_dflash_right": 1.486, "sglang_graphs_off": 1.844,
    "sglang_other_algorithm": 1.844, "sglang_other_budget": 1.844, "sglang_other_window": 1.844,
    "sglang_random_drafter": 1.2, "native_right": 1.2, "vllm_ngram": 1.2,
}  # fmt: skip


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_no_recorded_verdict_changes_beside_the_drafters_folder(file, tmp_path, monkeypatch):
    """Random weights were run from a folder that promised something of others."""
    folder = shutil.copytree(THEIR_DRAFTER, tmp_path / "drafter")
    (folder / "model.safetensors").write_bytes(b"the weights of then")
    theirs = json.loads((folder / "expected_tau.json").read_text())["tau"]
    promise(folder, "0" * 64 if "random" in file.stem else None, **theirs)
    kept = json.loads(file.read_text(encoding="utf-8").replace("/models/drafter", str(folder)))
    ask_as_then(kept, monkeypatch)
    with serving(replaying(kept)) as url:
        verdict = Verification(url, Expectation(**kept["expectation"]), Options(**kept["options"])).run()
    assert verdict.status.value == kept["verdict"], verdict.to_json()
    assert {f"{each.probe}: {each.claim}" for each in broken(verdict)} == set(kept["violated"])
    found = [each.claim for each in verdict.findings if each.claim.endswith("tokens (tau)")]
    assert found == ([FLOOR.format(FLOORS[file.stem])] if file.stem in FLOORS else [])
