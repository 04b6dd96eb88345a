"""The deployment file: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddtree.deploy import json_schema, load_deployment, parse_deployment, to_deployment
from ddtree.errors import UserError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "deployments").glob("*.toml"))

BASE: dict[str, Any] = {
    "engine": {"kind": "native"},
    "model": {"path": "/models/target"},
    "drafter": {"path": "/models/drafter"},
    "speculation": {"algorithm": "ddtree", "budget": 8},
    "service": {"name": "s", "port": 8000},
}
SGLANG: dict[str, Any] = BASE | {"engine": {"kind": "sglang", "venv": "/v"}}
VLLM: dict[str, Any] = BASE | {
    "engine": {"kind": "vllm", "venv": "/v"},
    "speculation": {"algorithm": "dflash", "block_size": 8},
}
PLAIN: dict[str, Any] = {k: v for k, v in BASE.items() if k != "drafter"} | {"speculation": {"algorithm": "none"}}


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with dotted keys set; None takes a key out."""
    data: dict[str, Any] = json.loads(json.dumps(base))
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        table = data
        for part in path:
            table = table.setdefault(part, {})
        if value is None:
            table.pop(last)
        else:
            table[last] = value
    return data


def refusal(data: dict[str, Any]) -> UserError:
    with pytest.raises(UserError) as caught:
        to_deployment(data, told="x.toml")
    assert caught.value.remedy, caught.value
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_bases_are_sound() -> None:
    for base in (BASE, SGLANG, VLLM, PLAIN):
        to_deployment(base)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculation.budget": "8"}, ["speculation.budget is '8'"]),
        ({"speculation.budget": 0}, ["speculation.budget is 0", "1 to 1024"]),
        ({"speculation.budget": 1025}, ["speculation.budget is 1025"]),
        ({"speculation.budget": True}, ["speculation.budget is True"]),
        ({"speculation.draft_temperature": 0.09}, ["speculation.draft_temperature is 0.09", "0.1"]),
        ({"speculation.draft_temperature": 11}, ["speculation.draft_temperature is 11", "10"]),
        ({"speculation.draft_temperature": float("nan")}, ["speculation.draft_temperature is nan"]),
        ({"speculation.draft_temperature": float("inf")}, ["speculation.draft_temperature is inf"]),
        ({"speculation.draft_temperature": "0.8"}, ["speculation.draft_temperature is '0.8'"]),
        ({"speculation.draft_temperature": True}, ["speculation.draft_temperature is True"]),
        ({"speculation.bugdet": 8}, ["unknown key speculation.bugdet", "did you mean budget?"]),
        ({"modle": {}}, ["unknown key modle", "did you mean model?"]),
        ({"service.port": None}, ["service.port is missing", "Port to listen on"]),
        ({"service": None}, ["service is missing", "add [service]"]),
        ({"service.name": "a/b"}, ["service.name is 'a/b'"]),
        ({"service.name": "x" * 64}, ["service.name"]),
        ({"service.name": "-x"}, ["service.name"]),
        ({"service.ready_timeout_s": float("nan")}, ["service.ready_timeout_s is nan"]),
        ({"service.ready_timeout_s": -1}, ["service.ready_timeout_s is -1"]),
        ({"model.path": "models/x"}, ["model.path is 'models/x'", "full path"]),
        ({"model.path": "/models/../x"}, ["model.path", "without '..'"]),
        ({"model.path": "/a\nExecStartPre=/bin/sh"}, ["model.path", "control character"]),
        ({"model.path": ""}, ["model.path is ''"]),
        ({"model.path": None}, ["model names no weights"]),
        ({"service.description": "a\u202eb"}, ["service.description", "control character"]),
        ({"service.memory_max_gib": 1e300}, ["service.memory_max_gib is 1e+300"]),
        ({"service.restart_delay_s": 1e-9}, ["service.restart_delay_s is 1e-09"]),
        ({"service.tasks_max": 10**30}, ["service.tasks_max"]),
        ({"model.hub": "a/..", "model.revision": "0" * 40}, ["model.hub is 'a/..'", "owner/name"]),
        ({"runtime.env": {"MYAPIKEY": "x"}}, ["MYAPIKEY, which looks like a secret"]),
        ({"runtime.env": {"HTTPS_PROXY": "http://me:secret@proxy"}}, ["HTTPS_PROXY, which holds a password"]),
        ({"runtime.extra_args": ["--hf-token", "x"]}, ["extra_args has --hf-token", "reads command lines"]),
        ({"runtime.extra_args": ["--ssl-keyfile-password=x"]}, ["extra_args has --ssl-keyfile-password"]),
        ({"secrets.api_key": "sk-0123"}, ["secrets.api_key names no place", "{ file = ... }"]),
        ({"secrets.env": {"HF_TOKEN": "hf_0123"}}, ["secrets.env.HF_TOKEN names no place"]),
        ({"model.hub": "a/b"}, ["model has hub without revision", "40 hex"]),
        ({"model.hub": "a/b", "model.revision": "main"}, ["model.revision is 'main'"]),
        ({"model.demo": True}, ["model has demo beside path"]),
        ({"engine.kind": "tgi"}, ["engine.kind is 'tgi'", "'native', 'sglang' or 'vllm'"]),
        ({"engine.venv": "/v", "engine.executable": "/v/bin/ddtree"}, ["engine has both venv and executable"]),
        ({"runtime.extra_args": ["--x", 3]}, ["runtime.extra_args[1] is 3"]),
        ({"runtime.env": {"A B": "x"}}, ["runtime.env.A B"]),
        ({"runtime.env": {"HF_TOKEN": "x"}}, ["HF_TOKEN, which looks like a secret", "[secrets.env]"]),
        ({"runtime.env": {"INVOCATION_ID": "x"}}, ["INVOCATION_ID"]),
        ({"runtime.env": {"A": "x"}, "secrets.env": {"A": {"env": "B"}}}, ["A is in runtime.env and in secrets.env"]),
        ({"secrets.api_key": {}}, ["secrets.api_key needs one source"]),
        ({"secrets.api_key": {"file": "a", "env": "B"}}, ["secrets.api_key needs one source"]),
        ({"host.address": "h"}, ["host has address with kind local"]),
        ({"host.kind": "ssh"}, ["host has kind ssh without address"]),
        ({"host.kind": "ssh", "host.address": "-oProxyCommand=x"}, ["host.address"]),
        ({"host.kind": "ssh", "host.address": "-v"}, ["host.address is '-v'"]),
        ({"host.kind": "ssh", "host.address": "h", "host.user": "-v"}, ["host.user is '-v'"]),
        (
            {"host.kind": "ssh", "host.address": "h", "host.known_hosts_file": 'a"b'},
            ["host.known_hosts_file", "quotes"],
        ),
        ({"model.served_name": "--x"}, ["model.served_name"]),
        ({"service.description": "a\\"}, ["service.description", "backslash"]),
        ({"service.address": "--x"}, ["service.address"]),
        ({"parallelism.node_rank": 1}, ["node_rank 1 of 1"]),
        ({"parallelism.nodes": 2}, ["nodes above 1 without init_address"]),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_by_its_key(changes: dict[str, Any], words: list[str]) -> None:
    told = str(refusal(changed(BASE, changes)))
    assert told.startswith("x.toml: ") and "0123" not in told
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (BASE, {"drafter": None}, ["without a drafter"]),
        (PLAIN, {"drafter.path": "/d"}, ["[drafter] with"]),
        (PLAIN, {"speculation.budget": 8}, ["speculation.budget has no meaning"]),
        (PLAIN, {"speculation.draft_temperature": 0.8}, ["speculation.draft_temperature has no meaning"]),
        (PLAIN, {"expect.tau_floor": 2.0}, ["expect.tau_floor"]),
        (BASE, {"speculation.algorithm": "dflash", "speculation.topk_cap": 2}, ["topk_cap does not apply to a chain"]),
        *(
            (base, {"speculation.algorithm": "dflash", "speculation.draft_temperature": 0.8}, ["to a chain"])
            for base in (BASE, SGLANG, VLLM)
        ),
        (BASE, {"speculation.draft_window": 4, "speculation.block_size": 8}, ["draft_window 4 is below block_size 8"]),
        (BASE, {"runtime.device": "cpu", "runtime.cuda_graphs": True}, ["CUDA graphs", "cpu"]),
        (BASE, {"parallelism.tp": 2}, ["parallelism.tp with the native engine"]),
        (BASE, {"model.attention": "mla"}, ['model.attention = "mla"']),
        (BASE, {"runtime.cuda_graphs": False}, ["runtime.cuda_graphs = false with the native engine"]),
        (BASE, {"runtime.nvls": True}, ["runtime.nvls with the native engine"]),
        (
            BASE,
            {"model.path": None, "model.hub": "a/b", "model.revision": "0" * 40},
            ["model.hub without", "ddtree fetch"],
        ),
        (BASE, {"runtime.extra_args": ["--budget", "9"]}, ["extra_args has --budget", "speculation.budget"]),
        (SGLANG, {"parallelism.pp": 2}, ["parallelism.pp 2 with", "ddtree"]),
        (SGLANG, {"parallelism.pp": 2, "speculation": {"algorithm": "dflash"}}, ["parallelism.pp 2 with", "dflash"]),
        (
            SGLANG,
            {"parallelism": {"tp": 4, "dp": 2, "dp_attention": True}},
            ["parallelism.dp_attention with", "ddtree"],
        ),
        (SGLANG, {"parallelism": {"tp": 8, "ep": 3}}, ["parallelism.ep 3 does not divide tp 8"]),
        (SGLANG, {"model.attention": "mla"}, ["attention_backend is missing", "triton"]),
        (SGLANG, {"model.attention": "mla", "runtime.attention_backend": "flashinfer"}, ["is flashinfer", "triton"]),
        (SGLANG, {"runtime.attention_backend": "trtllm_mha"}, ["cannot verify trees"]),
        (SGLANG, {"speculation.budget": "auto"}, ["speculation.budget is auto with sglang"]),
        (SGLANG, {"speculation.budget": None}, ["speculation.budget is missing with sglang"]),
        (SGLANG, {"runtime.device": "cpu"}, ['runtime.device = "cpu"']),
        (SGLANG, {"runtime.nvls": True}, ["runtime.nvls with parallelism.tp = 1"]),
        (SGLANG, {"runtime.extra_args": ["--enable-lora"]}, ["LoRA"]),
        (SGLANG, {"runtime.extra_args": ["--api-key=x"]}, ["extra_args has --api-key", "secrets.api_key"]),
        (SGLANG, {"runtime.extra_args": ["--tp", "2"]}, ["parallelism.tp"]),
        (SGLANG, {"runtime.extra_args": ["--attention-b", "fa3"]}, ["runtime.attention_backend"]),
        (SGLANG, {"runtime.extra_args": ["--api_key", "x"]}, ["secrets.api_key"]),
        (SGLANG, {"secrets.api_key": {"env": "K"}}, ["writes its key into its log", "allow_key_in_log"]),
        (VLLM, {"speculation": {"algorithm": "ddtree", "budget": 8}}, ["no draft trees"]),
        (VLLM, {"speculation.block_size": None}, ["speculation.block_size is missing"]),
        (VLLM, {"speculation.draft_window": 64}, ["speculation.draft_window with vllm"]),
        (VLLM, {"parallelism": {"tp": 4, "ep": 2}}, ["parallelism.ep 2 with vllm"]),
        (BASE, {"service.address": "0.0.0.0"}, ["service.address 0.0.0.0", "api_key"]),
        (BASE, {"service.address": "::"}, ["service.address ::"]),
        (BASE, {"service.supervisor": "process", "service.restart": "always"}, ["starts nothing again"]),
        (BASE, {"service.supervisor": "process", "service.memory_max_gib": 4.0}, ["service.memory_max_gib"]),
        (BASE, {"service.supervisor": "process", "host.privilege": "sudo"}, ["host.privilege"]),
        (SGLANG, {"drafter": None, "speculation": {"algorithm": "custom"}}, ["without a flag for it"]),
        (
            SGLANG,
            {"drafter": None, "speculation": {"algorithm": "custom", "draft_temperature": 0.8}},
            ["speculation.draft_temperature has no meaning"],
        ),
        (
            SGLANG,
            {"speculation.topk_cap": 1, "speculation.draft_temperature": 0.8},
            ["draft_temperature with topk_cap = 1"],
        ),
        (
            SGLANG,
            {"speculation.budget": 1, "speculation.draft_temperature": 0.8},
            ["draft_temperature with budget = 1"],
        ),
        (
            SGLANG,
            {"runtime.extra_args": ["--speculative-ddtree-draft-temperature=0.8"]},
            ["speculation.draft_temperature"],
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) and len(value) < 4 else "",
)
def test_a_combination_that_cannot_work_is_refused(
    base: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    told = str(refusal(changed(base, changes)))
    assert all(word in told for word in words), told


@pytest.mark.parametrize("given", [0.1, 0.8, 1, 10])
def test_a_draft_temperature_is_a_fraction_however_it_is_written(given: float) -> None:
    found = to_deployment(changed(BASE, {"speculation.draft_temperature": given})).speculation.draft_temperature
    assert type(found) is float and found == given
    assert to_deployment(BASE).speculation.draft_temperature is None


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_read(path: Path) -> None:
    deployment = load_deployment(path)
    again = to_deployment(deployment.model_dump(mode="json", exclude_unset=True))
    assert again == deployment


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


def test_own_files_are_found_from_the_deployment_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    text = """
        engine.kind = "native"
        model.demo = true
        speculation.algorithm = "ddtree"
        service = { name = "s", port = 1 }
        secrets.api_key.file = "keys/k"
        host = { kind = "ssh", address = "h", identity_file = "~/.ssh/id" }
    """
    deployment = parse_deployment(text, folder=tmp_path)
    assert deployment.secrets.api_key is not None
    assert deployment.secrets.api_key.file == str(tmp_path / "keys/k")
    assert deployment.host.identity_file == "/somewhere/.ssh/id"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a = [", ["is not TOML"]),
        (b"\xff\xfe", ["is not UTF-8"]),
        (b"", ["engine is missing"]),
        (b"a = 1\n" + b"#" * (1 << 20), ["larger than 1 MiB"]),
        (b"x = " + b"[" * 5000 + b"]" * 5000, ["is not TOML"]),
    ],
)
def test_files_that_are_none_are_refused(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "d.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_deployment(path)
    assert all(word in str(caught.value) for word in words)
    with pytest.raises(UserError, match="cannot read"):
        load_deployment(tmp_path / "none.toml")
    with pytest.raises(UserError, match="cannot read"):
        load_deployment(tmp_path)


def test_the_schema_describes_every_key() -> None:
    schema = json_schema()
    for name, table in schema["$defs"].items():
        assert table["additionalProperties"] is False, name
        for key, field in table["properties"].items():
            assert field.get("description") or "$ref" in field, f"{name}.{key} has no description"
