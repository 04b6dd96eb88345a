"""A tiny pair, and servers of it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from live_servers import CONTEXT, DRAFTS, VOCAB, ServerProcess

from tiny_models import make_drafter, make_target


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Folders of a target that never ends by itself, and of its drafter."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_target(folder / "tiny", "llama", eos_token_id=None, vocab_size=VOCAB, max_position_embeddings=CONTEXT)
    return target, make_drafter(folder / "drafter", target, block_size=2)


@pytest.fixture(scope="session")
def other_pair(tmp_path_factory):
    """The same shapes, other weights."""
    folder = tmp_path_factory.mktemp("other")
    target = make_target(
        folder / "tiny", "llama", seed=5, eos_token_id=None, vocab_size=VOCAB, max_position_embeddings=CONTEXT
    )
    return target, make_drafter(folder / "drafter", target, block_size=2)


@pytest.fixture(scope="session")
def server(pair):
    """One without a fault."""
    with ServerProcess(*pair, *DRAFTS) as running:
        running.url  # noqa: B018 - waits until it is ready
        yield running


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Baselines of one test are not those of another."""
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "cache"))
