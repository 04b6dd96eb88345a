"""A kit from a live service and its results: what is in it, what tools say to it, and the way back to life."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree.deploy import load_deployment
from ddtree.deploy.apply import stop
from ddtree.kit import bag
from ddtree.kit.canary import choose_canary
from ddtree.kit.check import check_folder
from ddtree.kit.open_kit import whole_kit
from ddtree.kit.record import EnvironmentRecord, ExperimentRecord, FetchList, KitRecord, ProcessRecord, read_record
from ddtree.kit.restore import RestoreOptions, plan_restore, restored_deployment

from .conftest import KEY, QUICK, Live, ddtree, free_port
from .planted import PLANTED

pytestmark = pytest.mark.timeout(280)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_what_is_in_it(sealed: Path, live: Live) -> None:
    data = sealed / bag.PAYLOAD
    kit = read_record(KitRecord, data / "kit.json")
    assert kit.verdict == "proven" and not kit.even_if_failing and len(kit.experiments) == 1

    process = read_record(ProcessRecord, data / "process.json")
    assert process.as_rendered and "--budget" in process.arguments and process.environment["OMP_NUM_THREADS"] == "1"
    installed, rendered = (data / f"services/launch.sh.{kind}" for kind in ("installed", "rendered"))
    assert installed.read_bytes() == rendered.read_bytes() and (data / "services/launch.sh.diff").read_bytes() == b""
    environment = read_record(EnvironmentRecord, data / "env/environment.json")
    assert {each.name: each.version for each in environment.packages}["ddtree"]
    assert all(each.content_sha256 for each in environment.packages if each.name in ("numpy", "torch", "httpx"))
    assert "kernel" in json.loads((data / "env/host.json").read_text())["outputs"]

    for name, folder in (("model", "tiny"), ("drafter", "drafter")):
        fetch = read_record(FetchList, data / name / "fetch.json")
        weights = live.folder / "weights" / folder
        assert {each.path for each in fetch.files} == set(contents(weights))
        assert all(bag.digest_of(weights / each.path) == each.sha256 for each in fetch.files)
        assert (data / name / "config.json").read_bytes() == (weights / "config.json").read_bytes()
    assert not [name for name in contents(data) if name.endswith(".safetensors")]

    experiment = read_record(ExperimentRecord, data / "experiments" / kit.experiments[0] / "experiment.json")
    assert experiment.is_complete and experiment.started < experiment.ended and experiment.command[1] == "bench"
    assert experiment.service_command and "--budget" in experiment.service_command
    assert experiment.service_environment and experiment.service_environment["OMP_NUM_THREADS"] == "1"
    assert experiment.server_facts and experiment.versions["ddtree"]
    assert experiment.cells[0].tau and experiment.cells[0].tau[0] == pytest.approx(2, abs=0.1)
    subprocess.run(
        ["sha256sum", "--quiet", "-c", "manifest-sha256.txt"], cwd=data / "experiments" / experiment.id, check=True
    )
    results = contents(live.results)
    assert contents(data / "bench/results/results") == {n: c for n, c in results.items() if n != ".lock"}
    assert "tiny-pair" in (data / "README.md").read_text() and "## " in (data / "REPORT.md").read_text()
    assert json.loads((data / "verify.json").read_text())["verdict"] == "proven"


def test_the_key_and_planted_tokens_are_nowhere_in_it(sealed: Path) -> None:
    """The service's key, a variable whose name tells, and two dozen kinds in variables and in the log."""
    for secret in (KEY, os.environ["KIT_TEST_TOKEN"], *PLANTED.values()):
        for name, content in contents(sealed).items():
            assert secret.encode() not in content and json.dumps(secret)[1:-1].encode() not in content, name
    assert (sealed / "data/logs/service.log").read_text().count("which was refused") == len(PLANTED)
    process = read_record(ProcessRecord, sealed / "data/process.json")
    assert process.environment["KIT_TEST_TOKEN"] == "***masked***"
    kit = read_record(KitRecord, sealed / "data/kit.json")
    assert "value of KIT_TEST_TOKEN" in {each.kind for each in kit.masked}


def test_common_tools_accept_it(sealed: Path) -> None:
    subprocess.run(["sha256sum", "--quiet", "-c", bag.MANIFEST, bag.TAG_MANIFEST], cwd=sealed, check=True)
    done = subprocess.run([sys.executable, "-m", "bagit", "--validate", str(sealed)], capture_output=True, text=True)
    assert done.returncode == 0 and "is valid" in done.stderr
    done = ddtree("kit", "check", sealed)
    assert "is whole; verdict when it was sealed: proven" in done.stdout
    assert "tiny-pair" in ddtree("kit", "show", sealed).stdout


def test_strict_refuses_and_leaves_nothing(live: Live, tmp_path: Path) -> None:
    done = ddtree("kit", "create", live.file, "--out", tmp_path / "k", "--strict", *QUICK, check=False)
    assert done.returncode == 2 and "process.json holds secrets (value of KIT_TEST_TOKEN)" in done.stderr
    assert not list(tmp_path.iterdir())


def test_results_are_added_and_the_earlier_manifest_stays(kit: Path, live: Live, tmp_path: Path) -> None:
    before = (kit / bag.MANIFEST).read_bytes()
    ddtree("kit", "sign", kit, "--key", _key(tmp_path))
    more = Path(shutil.copytree(live.results, tmp_path / "more"))
    text = (more / "run.json").read_text()
    run_id = json.loads(text)["run_id"]
    for path in more.glob("*.json*"):
        path.write_text(path.read_text().replace(run_id, "feedfeedfeed").replace("tiny on a CPU", "again"))
    (more / "run.json").write_text((more / "run.json").read_text().replace('"settings": {}', '"settings": {"a": 1}'))
    ddtree("kit", "add", kit, "--results", more)
    assert check_folder(kit).is_whole and not list(tmp_path.glob(".*"))
    record = read_record(KitRecord, kit / "data/kit.json")
    assert len(record.experiments) == 2 and (kit / "data" / record.earlier[0]).read_bytes() == before
    assert list((kit / "data/earlier/001/signatures").iterdir()) and not (kit / "signatures").exists()
    again = ddtree("kit", "add", kit, "--results", more, check=False)
    assert again.returncode == 2 and "has bench/results/more already" in again.stderr
    assert check_folder(kit).is_whole


def test_two_kits_are_compared(kit: Path, sealed: Path) -> None:
    assert ddtree("kit", "diff", sealed, kit).stdout == ""
    data = kit / "data"
    (data / "deployment.toml").write_text((data / "deployment.toml").read_text().replace("threads = 1", "threads = 2"))
    environment = json.loads((data / "env/environment.json").read_text())
    next(each for each in environment["packages"] if each["name"] == "numpy")["version"] = "9.9"
    (data / "env/environment.json").write_text(json.dumps(environment))
    _reseal(kit)
    done = ddtree("kit", "diff", sealed, kit, check=False)
    assert done.returncode == 1
    assert "-threads = 1" in done.stdout and "+threads = 2" in done.stdout and "9.9" in done.stdout


def test_git_carries_the_verdict(sealed: Path, tmp_path: Path) -> None:
    from ddtree.kit.git_commit import commit_kit

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("config", "user.email", "kit@example.org")
    git("config", "user.name", "kit")
    (tmp_path / ".gitignore").write_text("*.log\n")
    place = Path(shutil.copytree(sealed, tmp_path / "tiny-kit"))
    (tmp_path / "other").write_text("staged by somebody else")
    git("add", "other")
    commit = commit_kit(place, read_record(KitRecord, place / "data/kit.json"))
    assert git("log", "-1", "--format=%H %s").strip() == f"{commit} Kit tiny-kit: proven"
    assert "other" not in git("show", "--stat", "--format=")
    git("clone", "-q", ".", "clone")
    assert check_folder(tmp_path / "clone" / "tiny-kit").is_whole


def test_a_failing_service_is_sealed_only_on_purpose(live: Live, tmp_path: Path) -> None:
    """The file declares another budget than the one that runs."""
    text = live.file.read_text()
    budget = load_deployment(live.file).speculation.budget
    other = live.folder / "other.toml"
    other.write_text(text.replace(f"budget = {budget}", f"budget = {int(str(budget)) - 1}"))
    words = ("kit", "create", other, "--out", tmp_path / "k", *QUICK)
    done = ddtree(*words, check=False)
    assert done.returncode == 2 and "not sealed: tiny-pair is not what it declares" in done.stderr
    assert not list(tmp_path.iterdir())
    launch = live.folder / "state/ddtree/tiny-pair/launch.sh"
    before = launch.read_text()
    launch.write_text(before + "".join(f"# by hand: {secret}\n" for secret in PLANTED.values()))
    try:
        told = ddtree(*words, "--even-if-failing")
    finally:
        launch.write_text(before)
    assert "verdict violated" in told.stdout
    installed = (tmp_path / "k/data/services/launch.sh.installed").read_text()
    assert installed.count("# by hand: ") == len(PLANTED) and not [s for s in PLANTED.values() if s in installed]
    record = read_record(KitRecord, tmp_path / "k/data/kit.json")
    assert record.even_if_failing and record.places[0].verdict == "violated"
    assert "was sealed although" in (tmp_path / "k/data/README.md").read_text()
    assert any("another command line" in note for note in record.places[0].notes)
    assert any("not what the deployment file renders to" in note for note in record.places[0].notes)
    assert check_folder(tmp_path / "k").is_whole


def test_the_plan_shows_every_step_and_changes_nothing(sealed: Path, live: Live, tmp_path: Path) -> None:
    state = contents(live.folder / "state")
    done = ddtree(
        *("kit", "restore", sealed, "--plan", "--set", f"model.path={tmp_path}/w/tiny", "--set", "service.name=other"),
        *("--set", f"service.port={free_port()}", "--json"),
        check=False,
        cwd=live.folder,
    )
    steps = json.loads(done.stdout)["steps"]
    by_name = {step["name"]: step for step in steps}
    assert done.returncode == 1 and by_name["model"]["state"] == "refused", steps
    assert by_name["service"]["state"] == by_name["canary"]["state"] == "to do"
    assert {"doctor", "model", "drafter", "environment", "patches", "service", "verify", "canary"} <= by_name.keys()
    assert not list(tmp_path.iterdir()) and contents(live.folder / "state").keys() == state.keys()
    refused = ddtree("kit", "restore", sealed, "--set", f"model.path={tmp_path}/w", check=False, cwd=live.folder)
    assert refused.returncode == 2 and "nothing says where they come from" in refused.stderr


def test_round_trip(sealed: Path, live: Live, tmp_path: Path) -> None:
    """On this machine, as another service: from the packed kit to a service that is as sealed, and once more."""
    archive = tmp_path / "tiny-kit.tar.zst"
    ddtree("kit", "pack", sealed, "--out", archive)
    port = free_port()
    changes = ("--set", "service.name=tiny-again", "--set", f"service.port={port}")
    quick = ("--long-tokens", "0", "--concurrency", "1", "--probe-tokens", "16")
    options = RestoreOptions(changes={"service.name": "tiny-again", "service.port": port})
    try:
        done = ddtree("kit", "restore", archive, *changes, *quick, "--json", cwd=live.folder)
        told = json.loads(done.stdout)
        assert told["as_sealed"] and told["verdict"]["verdict"] == "proven" and told["sealed_verdict"] == "proven"
        canary = told["canary"]
        assert canary["is_within"] and canary["tau_now"]["value"] == pytest.approx(
            canary["tau_sealed"]["value"], abs=0.05
        )
        assert canary["speed_ratio"]["value"] > 0
        os.chdir(live.folder)
        with whole_kit(sealed) as (payload, record):
            steps = {step.name: step.state for step in plan_restore(payload, record, options)}
            assert steps["service"] == "done", "run again, there is nothing to do"
    finally:
        stop(restored_deployment(sealed / "data", options.changes))


def test_a_kit_without_its_prompts_says_that_nothing_can_be_measured(kit: Path) -> None:
    (kit / "data/bench/prompts.jsonl").unlink()
    _reseal(kit)
    with whole_kit(kit) as (payload, record):
        deployment = restored_deployment(payload, {})
        command = read_record(ExperimentRecord, payload / f"experiments/{record.experiments[0]}/experiment.json")
        told = choose_canary(payload, record, deployment, command.service_command or [])
    assert isinstance(told, str) and "the prompts of prompts are not in the kit" in told


def _reseal(kit: Path) -> None:
    from ddtree.kit.create import finish
    from ddtree.kit.durable import replacing

    with replacing(kit) as draft:
        shutil.copytree(kit / "data", draft, dirs_exist_ok=True)
        finish(draft, read_record(KitRecord, draft / "kit.json"))


def _key(folder: Path) -> Path:
    from .test_signature import make_key

    return make_key(folder / "key")
