"""A tiny pair behind real servers on loopback ports."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import httpx
import openai
import pytest
from live import Live, live, tiny_loader

from ddtree import Engine, Speculation
from tiny_models import ALPHABET, SPECIAL_TOKENS, make_drafter, make_target

VOCAB = len(SPECIAL_TOKENS) + len(ALPHABET)


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory):
    """Folders of a target that never ends by itself, and of its drafter."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_target(folder / "tiny", "llama", eos_token_id=None, vocab_size=VOCAB)
    return target, make_drafter(folder / "drafter", target, block_size=6)


@pytest.fixture(scope="session")
def tiny_engine(tiny_folders) -> Engine:
    """The same pair without a server, to compare with."""
    return tiny_loader(tiny_folders)(lambda stage, progress: None)


@pytest.fixture(scope="module")
def server(tiny_folders):
    with live(tiny_loader(tiny_folders), max_queue=40) as running:
        yield running


@pytest.fixture
def http(server: Live):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(server: Live):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def real_server(target_folder):
    """The demo's pair in float32."""
    from ddtree.demo import drafter_folder

    def load(tell):
        return Engine.load(
            target_folder, drafter_folder(), dtype="float32", max_model_len=512, max_batch=4,
            speculation=Speculation("tree", 16), on_progress=tell,
        )  # fmt: skip

    with live(load) as running:
        yield running
