"""What the server says about itself: facts, metrics, the page."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import threading

import httpx
import pytest
from live import live, tiny_loader

from ddtree.engine.budget_policy import CANDIDATES

LONG = {"prompt": "abc", "max_tokens": 200, "temperature": 0}


def test_server_info_tells_asked_and_effective(http, tiny_folders):
    facts = http.get("/server_info").json()
    target, drafter = tiny_folders
    engine = facts["effective"]["engine"]
    assert engine["model_config_sha256"] == hashlib.sha256((target / "config.json").read_bytes()).hexdigest()
    assert engine["draft_config_sha256"] == hashlib.sha256((drafter / "config.json").read_bytes()).hexdigest()
    assert (engine["device"], engine["dtype"], engine["mode"], engine["budget"]) == ("cpu", "float32", "tree", 32)
    assert facts["requested"]["engine"] == {"model": "tiny"}
    assert facts["requested"]["server"]["max_queue"] == 40
    assert facts["effective"]["answers_at_most"] == 44
    assert facts["effective"]["rounds"]["launch"] == "eager" and facts["effective"]["rounds"]["graphs"] == []
    http.post("/v1/completions", json=LONG | {"max_tokens": 60, "ddtree": {"budget": "auto"}})
    costs = http.get("/server_info").json()["effective"]["rounds"]["cost_ms_by_batch_and_budget"]
    assert set(map(str, CANDIDATES)) == costs["1"].keys() and min(costs["1"].values()) > 0
    assert facts["versions"]["ddtree"] and facts["versions"]["torch"]
    assert facts["ready"] and facts["model_name"] == "tiny"
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", facts["commit"] or "0" * 40)


def test_metrics_equal_the_usage_of_the_responses(tiny_folders):
    with live(tiny_loader(tiny_folders)) as server:
        prompt_tokens = completion_tokens = rounds = 0
        for i in range(6):
            body = {"prompt": ["abc", "x"], "max_tokens": 9 + i, "seed": i, "n": 1 + i % 2}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()
            prompt_tokens += answer["usage"]["prompt_tokens"]
            completion_tokens += answer["usage"]["completion_tokens"]
            rounds += answer["ddtree"]["rounds"]
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": 1}).status_code == 400
        assert httpx.get(f"{server.url}/no/such/path").status_code == 404
        metric = server.metric
        assert metric("ddtree_prompt_tokens_total") == prompt_tokens
        assert metric("ddtree_completion_tokens_total") == completion_tokens
        assert metric("ddtree_rounds_total") == metric("ddtree_rounds_total", mode="tree", budget="32") == rounds
        assert metric("ddtree_accepted_length_count") == rounds
        choices = 18
        assert metric("ddtree_accepted_length_sum") == completion_tokens - choices, "the first token is prefill's"
        assert metric("ddtree_inter_token_seconds_count") == completion_tokens - choices
        assert metric("ddtree_time_to_first_token_seconds_count") == choices
        assert metric("ddtree_finished_choices_total", reason="length") == choices
        assert metric("ddtree_requests_total", endpoint="/v1/completions", status="200") == 6
        assert metric("ddtree_requests_total", endpoint="/v1/completions", status="400") == 1
        assert metric("ddtree_requests_total", endpoint="other", status="404") == 1
        assert 1 <= metric("ddtree_tau") <= 6
        assert metric("ddtree_tokens_per_second") > 0
        assert metric("ddtree_running_sequences") == metric("ddtree_waiting_sequences") == 0
        assert metric("ddtree_cache_tokens") > 0 and metric("ddtree_cache_tokens_used") == 0


def test_every_metric_is_in_the_docs(http):
    from pathlib import Path

    docs = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    names = re.findall(r"^# TYPE (\S+) ", http.get("/metrics").text, re.MULTILINE)
    names = [name for name in names if not name.endswith("_created")]
    assert len(names) > 15
    assert [name for name in names if f"`{name}`" not in docs] == []


@pytest.mark.parametrize("show_text", [True, False])
def test_the_page_gets_a_tree(tiny_folders, show_text):
    with live(tiny_loader(tiny_folders), show_text=show_text) as server:
        status = httpx.get(f"{server.url}/status").json()
        assert status["tree"] is None and status["ready"]
        threads = [
            threading.Thread(
                target=httpx.post, args=(f"{server.url}/v1/completions",), kwargs={"json": LONG, "timeout": 60}
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        status = httpx.get(f"{server.url}/status").json()
        tree = status["tree"]
        assert len(tree["nodes"]) + tree["hidden"] == 32
        assert sum(node["accepted"] for node in tree["nodes"]) == tree["accepted"]
        assert all(-1 <= node["parent"] < place for place, node in enumerate(tree["nodes"]))
        assert (tree["root"] is not None) == (tree["nodes"][0]["text"] is not None) == show_text
        assert status["tok_s"] > 0 and 1 <= status["tau"] <= 6


def test_trees_are_recorded_only_while_somebody_looks(server, http):
    http.post("/v1/completions", json=LONG, timeout=30)
    server.service.pulse._watched_until = 0.0
    server.service.pulse._tree = None
    http.post("/v1/completions", json=LONG, timeout=30)
    assert server.service.pulse.look().tree is None


def test_the_page_needs_nothing_from_elsewhere(http):
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", page.text)) - {"http://www.w3.org/2000/svg"}
    assert addresses == set() and "src=" not in page.text


@pytest.mark.skipif(shutil.which("node") is None, reason="node checks the page's script")
def test_the_pages_script_can_be_read(http, tmp_path):
    script = http.get("/").text.split("<script>")[1].split("</script>")[0]
    (tmp_path / "page.js").write_text(script)
    subprocess.run(["node", "--check", tmp_path / "page.js"], check=True, timeout=30)


def test_the_openapi_document_names_every_field(http):
    document = http.get("/openapi.json").json()
    schema = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    assert {"messages", "temperature", "ddtree", "stop", "ignore_eos"} <= schema["properties"].keys()
    assert schema["additionalProperties"] is False
    for reference in set(re.findall(r'"\$ref": "(#[^"]+)"', __import__("json").dumps(document))):
        found = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
