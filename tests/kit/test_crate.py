"""An RO-Crate validator, of the profile's own makers, accepts what we write."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rocrate

from ddtree.kit import bag
from ddtree.user_cache import cache_folder

VERSION = "0.13.0"
EXAMPLES = Path(__file__).parents[2] / "examples" / "kits"
RUNNER = Path(__file__).with_name("rocrate_validator_offline.py")
CONTEXT = Path(rocrate.__file__).parent / "data" / "ro-crate.jsonld"


@pytest.fixture(scope="session")
def validator() -> Path:
    """Its Python: in an environment of its own, since it pins versions that do not go with ours; made once and kept."""
    folder = cache_folder() / "test-tools"
    folder.mkdir(parents=True, exist_ok=True)
    venv = folder / f"roc-validator-{VERSION}-{sys.version_info.major}{sys.version_info.minor}"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (venv / "done").exists():
            shutil.rmtree(venv, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
            words = ["-m", "pip", "--disable-pip-version-check", "install", "-q", f"roc-validator=={VERSION}"]
            done = subprocess.run([str(venv / "bin" / "python"), *words], capture_output=True, text=True, timeout=250)
            if done.returncode:
                told = done.stderr.strip().splitlines()[-1:]
                print(f"\nNO RO-CRATE VALIDATOR, SO CRATES ARE NOT VALIDATED: {told}", file=sys.__stderr__, flush=True)
                pytest.skip(f"no RO-Crate validator: {told}")
            (venv / "done").touch()
    return venv / "bin" / "python"


def issues(validator: Path, crate: Path, out: Path) -> list[str]:
    words = [
        "-y",
        "validate",
        "--no-paging",
        "-f",
        "json",
        "-o",
        out,
        "-p",
        "process-run-crate",
        "-l",
        "required",
        crate,
    ]
    done = subprocess.run([validator, RUNNER, CONTEXT, *words], capture_output=True, text=True, timeout=200)
    assert out.exists(), done.stdout[-1000:] + done.stderr[-1000:]
    told = json.loads(out.read_text())
    found = [f"{each['check']['identifier']}: {each['message']}" for each in told["issues"]]
    assert told["passed"] == (not found)
    return found


def test_kits_are_process_run_crates(validator: Path, small: Path, tmp_path: Path) -> None:
    (example,) = EXAMPLES.iterdir()
    for number, kit in enumerate((small, example)):
        assert issues(validator, kit / bag.PAYLOAD, tmp_path / f"{number}.json") == []


def test_the_validator_sees_faults(validator: Path, small: Path, tmp_path: Path) -> None:
    kit = Path(shutil.copytree(small, tmp_path / "kit"))
    (kit / "data" / "verify.json").unlink()
    assert any("verify.json" in told for told in issues(validator, kit / bag.PAYLOAD, tmp_path / "out.json"))
