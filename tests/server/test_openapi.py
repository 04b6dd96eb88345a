"""The OpenAPI document is true: whatever it allows or forbids is sent, and what comes back is as it says."""

from __future__ import annotations

import time

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from live import live, tiny_loader

from ddtree.server import ServerSettings, create_app

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is in the dev extra")
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import CHECKS, load_all_checks  # noqa: E402

EXAMPLES = 25
"""Bodies for each operation and mode: what the document allows, and what it forbids."""

# The document cannot say which fields contradict each other, so a body it allows may still be refused with 400.
LEFT_OUT = {"positive_data_acceptance"}


@pytest.fixture(scope="module")
def described_server(tiny_folders):
    with live(tiny_loader(tiny_folders, max_model_len=64), max_queue=2, request_timeout_s=20) as running:
        yield running


@pytest.fixture(scope="module")
def document(described_server):
    return schemathesis.openapi.from_url(f"{described_server.url}/openapi.json")


@pytest.fixture(scope="module")
def checks():
    load_all_checks()
    found = {check.__name__: check for check in CHECKS.get_all()}
    assert {"not_a_server_error", "response_schema_conformance", "negative_data_rejection"} <= found.keys()
    return [check for name, check in found.items() if name not in LEFT_OUT]


OPERATIONS = [
    (f"{method.upper()} {path}", mode)
    for path, each in create_app(ServerSettings(model_name="m"), lambda tell: None, {}).openapi()["paths"].items()
    for method in each
    for mode in (list(GenerationMode) if method == "post" else [GenerationMode.POSITIVE])  # a GET takes nothing
]
statuses: dict[str, list[int]] = {}


@pytest.mark.parametrize(("label", "mode"), OPERATIONS, ids=lambda each: getattr(each, "value", each))
def test_every_operation_answers_as_described(document, checks, label, mode):
    method, path = label.split(" ")
    operation = document[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES if method == "POST" else 2, deadline=None, derandomize=True, database=None,
        phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def send(case):
        began = time.monotonic()
        response = case.call(timeout=30)
        assert time.monotonic() - began < 25
        statuses.setdefault(label, []).append(response.status_code)
        case.validate_response(response, checks=checks)

    send()


def test_good_and_bad_bodies_were_sent(described_server):
    assert statuses, "this test looks at what the one above did"
    assert {
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /tokenize",
        "POST /detokenize",
    } <= statuses.keys()
    for operation, seen in statuses.items():
        assert max(seen) < 500, operation
        if operation.startswith("POST"):
            assert 400 in seen, operation
    assert 200 in statuses["POST /tokenize"] and 200 in statuses["POST /v1/completions"]
    assert described_server.is_empty()
    assert described_server.metric("ddtree_failed_steps_total") == 0


def test_the_document_names_the_key_and_the_open_paths(described_server):
    document = httpx.get(f"{described_server.url}/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    is_open = {path for path, each in document["paths"].items() if all(o["security"] == [] for o in each.values())}
    assert is_open == {"/", "/health", "/ready"}
    for path, each in document["paths"].items():
        for operation in each.values():
            assert ("401" in operation["responses"]) == (path not in is_open), path
