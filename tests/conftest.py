"""The real pair: SmolLM2-135M-Instruct and the drafter that ships with the demo, loaded once."""

import json
import signal
from pathlib import Path

import pytest

import ddtree.openmp  # noqa: F401 - before a test imports torch

# A shell that runs tests in the background has them ignore Ctrl-C, and so would every command that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

BENCHMARK_PROMPTS = Path(__file__).parents[2] / "shared" / "data" / "prompts"


@pytest.fixture(scope="session")
def target_folder():
    """Folder of the demo's target; fetched once, then taken from the user's cache."""
    from ddtree.demo.target import target_folder

    return target_folder()


@pytest.fixture(scope="session")
def real_engine(target_folder):
    """The pair in float32, where every mode must give the same tokens."""
    from ddtree import Engine
    from ddtree.demo import drafter_folder

    return Engine.load(target_folder, drafter_folder(), dtype="float32", max_model_len=1024, max_batch=4)


@pytest.fixture(scope="session")
def prompts():
    """A few questions: benchmark prompts where the checkout has them beside it, else the demo's own."""
    if BENCHMARK_PROMPTS.is_dir():
        rows = []
        for name in ("gsm8k_test100", "humaneval", "mt_bench"):
            lines = (BENCHMARK_PROMPTS / f"{name}.jsonl").read_text().splitlines()[:2]
            rows += [json.loads(line)["turns"][0] for line in lines]
        return rows
    from ddtree.demo.prompts import PROMPTS

    print("the benchmark prompts are not beside this checkout: the demo's own prompts are used")
    return [prompt.text for prompt in PROMPTS]
