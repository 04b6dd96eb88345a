"""A restore that is killed at any instant is run again, and finishes: weights, patches and service as sealed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddtree.deploy.apply import open_site, stop
from ddtree.errors import UserError
from ddtree.kit.bag import digest_of
from ddtree.kit.create import finish
from ddtree.kit.durable import appearing
from ddtree.kit.engine_restore import EngineRestore
from ddtree.kit.open_kit import whole_kit
from ddtree.kit.record import FetchList, KitRecord, PatchRecord, Place, WeightFile, read_record
from ddtree.kit.restore import RestoreOptions, plan_restore, restore, restored_deployment

from .conftest import free_port
from .engine_package import edit, engine_files, python, site

TRIES = 12
ENGINE = Path(__file__).parents[1] / "deploy" / "stand_in_engine.py"
_RESTORE = """
import os, sys
from pathlib import Path
from ddtree.deploy.apply import open_site
from ddtree.kit.open_kit import whole_kit
from ddtree.kit.restore import RestoreOptions, restore
import ddtree.fetch, ddtree.verify
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        with whole_kit(Path(sys.argv[1])) as (payload, kit):
            restore(payload, kit, RestoreOptions())
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


@pytest.fixture
def place(tmp_path: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kit with weights, patches and a service that starts at once; and a host without any of it but the engine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    venv = tmp_path / "venv"
    subprocess.run(["cp", "-a", str(fresh), str(venv)], check=True)
    source = ENGINE.read_text().replace("sys.argv[2::1], sys.argv[3::1]", "sys.argv[1::1], sys.argv[2::1]")
    launch = site(venv) / "sglang" / "launch_server.py"  # the stand-in in the engine's place: an added file
    edited = tmp_path / "edited"
    subprocess.run(["cp", "-a", str(fresh), str(edited)], check=True)
    edit(edited)
    (site(edited) / "sglang" / launch.name).write_text(source)
    with appearing(tmp_path / "kit") as draft:
        record = capture(edited, draft)
        (draft / "deployment.toml").write_text(
            f"""
            engine = {{ kind = "sglang", venv = "{venv}" }}
            model = {{ path = "{tmp_path}/weights", served_name = "m" }}
            speculation = {{ algorithm = "none" }}
            runtime = {{ device = "cpu" }}
            service = {{ name = "kit-killed", supervisor = "process", port = {free_port()}, ready_timeout_s = 60 }}
            """
        )
        weights = {"config.json": b"{}", "a.safetensors": os.urandom(300_000), "b/c.safetensors": os.urandom(200_000)}
        files = []
        for name, content in weights.items():
            (draft / "model" / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / "model" / name).write_bytes(content)
            digest = digest_of(draft / "model" / name)
            files.append(WeightFile(path=name, size_bytes=len(content), sha256=digest, in_kit=True))
        (draft / "model" / "fetch.json").write_text(FetchList(source="unknown", files=files).model_dump_json())
        (draft / "verify.json").write_text(json.dumps({"verdict": "unknown"}))
        finish(draft, sealed_record(tmp_path))
    assert len(record.files) == 6
    return tmp_path / "kit"


def capture(edited: Path, draft: Path) -> PatchRecord:
    from ddtree.kit.mask import Masker
    from ddtree.kit.patches import capture_patches

    return capture_patches(python(edited), "sglang", draft, Masker(), "", may_download=False)


def sealed_record(folder: Path) -> KitRecord:
    now = "2026-01-02T03:04:05+00:00"
    one = Place(name="kit-killed", folder=".", host="local", engine="sglang", is_running=True, verdict="unknown")
    return KitRecord(name="kit", created=now, sealed=now, tool="test", places=[one], even_if_failing=True)


def test_killed_at_any_instant_it_finishes(place: Path, tmp_path: Path) -> None:
    deployment = restored_deployment(place / "data", {})
    rng = random.Random(5)
    edited, base = engine_files(tmp_path / "edited"), engine_files(tmp_path / "venv")
    stages = set()
    try:
        with subprocess.Popen(
            [sys.executable, "-c", _RESTORE, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as factory:
            assert factory.stdin and factory.stdout
            for _ in range(TRIES):
                print("go", file=factory.stdin, flush=True)
                child = int(factory.stdout.readline())
                time.sleep(rng.uniform(0.05, 2.5))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                factory.stdout.readline()
                # What the host still writes, or was about to, has another name until it is whole.
                now = {n: c for n, c in engine_files(tmp_path / "venv").items() if not re.search(r"\.new\.\d+$", n)}
                for name, content in now.items():
                    assert content in (edited.get(name), base.get(name)), "half a file"
                weights = list((tmp_path / "weights").rglob("*.safetensors"))
                assert all(
                    digest_of(p) == digest_of(place / "data/model" / p.relative_to(tmp_path / "weights"))
                    for p in weights
                )
                stages.add((len(weights), now == edited))
            factory.stdin.close()
        with whole_kit(place) as (payload, kit):
            done = restore(payload, kit, RestoreOptions())
            assert not done.is_as_sealed and done.verdict.engine is None, "a stand-in proves nothing, and that is said"
            steps = {step.name: step.state for step in plan_restore(payload, kit, RestoreOptions())}
        assert {name: steps[name] for name in ("model", "patches", "service")} == dict.fromkeys(
            ("model", "patches", "service"), "done"
        )
        assert engine_files(tmp_path / "venv") == edited
        with open_site(deployment) as where:
            assert where.supervisor.state().status == "running"
    finally:
        stop(deployment)


def test_a_changed_engine_is_refused_before_anything_is_done(place: Path, tmp_path: Path) -> None:
    (site(tmp_path / "venv") / "sglang/srt/graph.py").write_text("mine\n")
    with whole_kit(place) as (payload, kit), pytest.raises(UserError, match=r"graph\.py is neither as released"):
        restore(payload, kit, RestoreOptions())
    assert not (tmp_path / "weights").exists() and not (tmp_path / "state").exists()


def test_what_a_power_cut_left_of_a_write_is_removed(place: Path, tmp_path: Path) -> None:
    """It is no change of somebody's, which would refuse every restore from then on."""
    half = site(tmp_path / "venv") / "sglang/srt/graph.py.new.4711"
    half.write_text("hal")
    with whole_kit(place) as (payload, kit):
        steps = plan_restore(payload, kit, RestoreOptions())
        assert not [step for step in steps if step.name == "environment" and step.state == "refused"], steps
        with open_site(restored_deployment(payload, {})) as where:
            EngineRestore(payload, where, (), False, lambda stage: None).run()
    assert not half.exists() and engine_files(tmp_path / "venv") == engine_files(tmp_path / "edited")


def test_weights_that_are_not_right_are_replaced(place: Path, tmp_path: Path) -> None:
    from ddtree.deploy.local_host import LocalHost
    from ddtree.kit.restore_weights import bring_weights, look_at_weights

    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "a.safetensors").write_bytes(b"cut")
    model = place / "data" / "model"
    plan = look_at_weights(LocalHost("none"), model, "model", str(weights))
    assert {each.path for each in plan.missing} == {"config.json", "a.safetensors", "b/c.safetensors"}
    bring_weights(LocalHost("none"), model, plan, is_local=True)
    assert look_at_weights(LocalHost("none"), model, "model", str(weights)).missing == ()
    fetch = read_record(FetchList, model / "fetch.json")
    nowhere = fetch.model_copy(update={"files": [fetch.files[0].model_copy(update={"in_kit": False, "path": "new"})]})
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "fetch.json").write_text(nowhere.model_dump_json())
    plan = look_at_weights(LocalHost("none"), tmp_path / "list", "model", str(weights))
    with pytest.raises(UserError, match="lacks new, and the kit does not know where"):
        bring_weights(LocalHost("none"), tmp_path / "list", plan, is_local=True)
    shutil.rmtree(weights)
