"""A tiny pair as a live service, what was measured on it, and the kit that was sealed from it."""

from __future__ import annotations

import json
import shutil
import socket
import string
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddtree.deploy import load_deployment
from ddtree.deploy.apply import apply, stop
from kit.engine_package import make_wheel
from kit.planted import PLANTED
from tiny_models import ALPHABET, SPECIAL_TOKENS, make_drafter, make_target

VOCAB = len(SPECIAL_TOKENS) + len(ALPHABET)
CONTEXT = 1536
KEY = "kit-test-Key-7Qz91xPw"
QUICK = ("--no-index", "--long-tokens", "0", "--concurrency", "1", "--probe-tokens", "16")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def ddtree(*arguments: object, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "ddtree", *map(str, arguments)], capture_output=True, text=True, timeout=240, **options
    )
    assert not check or done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    return done


@dataclass
class Live:
    """A service that runs: its deployment file, its weights, and what was measured on it."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "deployment.toml"

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """With one drafted position and a node for every token, even random weights are always right: tau is 2."""
    folder = tmp_path_factory.mktemp("live")
    target = make_target(
        folder / "weights" / "tiny", "llama", eos_token_id=None, vocab_size=VOCAB, max_position_embeddings=CONTEXT
    )
    make_drafter(folder / "weights" / "drafter", target, block_size=2)
    here = Live(folder)
    (folder / "key").write_text(f"{KEY}\n")
    here.file.write_text(
        f"""
# A tiny pair with random weights.
[engine]
kind = "native"

[model]
path = "{folder}/weights/tiny"
served_name = "tiny"

[drafter]
path = "{folder}/weights/drafter"

[speculation]
algorithm = "ddtree"
budget = {VOCAB}
topk_cap = {VOCAB}

[runtime]
device = "cpu"
dtype = "float32"
threads = 1
max_running_requests = 2
env.OMP_NUM_THREADS = "1"

[service]
name = "tiny-pair"
supervisor = "process"
port = {free_port()}
ready_timeout_s = 200

[secrets]
api_key = {{ file = "key" }}
"""
    )
    letters = string.ascii_lowercase
    rows = [{"id": f"p{n}", "turns": [letters[n : n + 9]]} for n in range(3)]
    here.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_STATE_HOME", str(folder / "state"))
    patch.setenv("DDTREE_CACHE", str(folder / "cache"))
    patch.setenv("KIT_TEST_TOKEN", "only-its-name-tells")
    for number, secret in enumerate(PLANTED.values()):
        patch.setenv(f"PLANTED_{number}", secret)  # the process inherits it
    deployment = load_deployment(here.file)
    try:
        apply(deployment)
        url = f"http://127.0.0.1:{deployment.service.port}"
        ddtree(
            *("bench", "--workload", here.prompts, "--base-url", url, "--repeats", "2", "--requests", "2"),
            *("--max-tokens", "24", "--warm-up", "1", "--out", here.results, "--deployment", here.file),
            *("--api-key-file", folder / "key", "--label", "tiny on a CPU"),
        )
        yield here
    finally:
        stop(deployment)
        patch.undo()


@pytest.fixture(scope="session")
def sealed(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kit of the live service; not to be changed."""
    kit = tmp_path_factory.mktemp("sealed") / "tiny-kit"
    with (live.folder / "state/ddtree/tiny-pair/service.log").open("a") as log:
        log.writelines(f"INFO asked with {secret}, which was refused\n" for secret in PLANTED.values())
    ddtree("kit", "create", live.file, "--out", kit, "--results", live.results, "--extra", live.prompts, *QUICK)
    return kit


@pytest.fixture
def kit(sealed: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(sealed, tmp_path / "tiny-kit"))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small kit without a service, made at once; not to be changed."""
    from kit.small_kit import make_small_kit

    return make_small_kit(tmp_path_factory.mktemp("small") / "small-kit")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine as it was released."""
    return make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with it; not to be changed."""
    venv = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    words = ["-m", "pip", "--disable-pip-version-check", "--python", str(venv / "bin" / "python"), "install", "--quiet"]
    subprocess.run([sys.executable, *words, "--no-index", str(wheel)], check=True)
    return venv
