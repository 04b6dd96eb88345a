"""A declared commit is held against what stands on the disk that the engine reads; without evidence it is unknown."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from between import serving
from test_engines import sglang_pages

from ddtree.deploy import to_deployment
from ddtree.verify import Expectation, Options, Status, from_deployment
from ddtree.verify.engines import detect
from ddtree.verify.finding import Finding, overall
from ddtree.verify.http_client import HttpClient
from ddtree.verify.probes.settings import probe_settings
from ddtree.verify.revision import ReadFile
from ddtree.verify.session import Session

COMMIT, OTHER = "a" * 40, "b" * 40
CONFIG = b'{"model_type": "llama"}'


def lock(revision: str | None = COMMIT, config: bytes = CONFIG) -> bytes:
    source = {"kind": "hub", "name": "owner/name", "revision": revision} if revision else {"kind": "urls", "name": "x"}
    files = [
        {
            "path": "config.json",
            "size_bytes": len(config),
            "sha256": hashlib.sha256(config).hexdigest(),
            "url": "https://x/y",
        }
    ]
    content = {"format": 1, "tool": "ddtree", "fetched_unix_s": 1.0, "source": source, "files": files}
    return json.dumps(content).encode()


def held_to(name: str, value: object, read: ReadFile | None = None, without: tuple[str, ...] = (), **args) -> Finding:
    """What is found of one declared setting at an SGLang of these arguments."""
    pages = sglang_pages(**args)
    for place in (pages["/server_info"], pages["/server_info"]["internal_states"][0]):
        for key in without:
            place.pop(key)

    def answer(method, path, body, headers):
        return (200, json.dumps(pages[path]).encode()) if path in pages else (404, b"{}")

    with serving(answer) as url:
        http = HttpClient(url)
        adapter = detect(http, None, None, 5, 5)
        session = Session(adapter, adapter.effective(), Expectation(settings={name: value}), Options(read=read))
        _, held = probe_settings(session)
        http.close()
    return held


def finding(read: ReadFile | None, **args: object) -> tuple[Finding, Status]:
    held = held_to("model_revision", COMMIT, read, **args)
    return held, held.status


def folder(**files: bytes | None) -> ReadFile:
    kept = {"/models/kimi/ddtree-fetch.lock.json": files.get("lock"), "/models/kimi/config.json": files.get("config")}
    return lambda path: kept.get(path)


def test_what_the_lock_file_of_fetch_tells():
    held, status = finding(folder(lock=lock(), config=CONFIG))
    assert status is Status.proven and "ddtree-fetch.lock.json of owner/name" in held.evidence[0]
    held, status = finding(folder(lock=lock(OTHER), config=CONFIG))
    assert status is Status.violated and OTHER in held.evidence[0] and "--check" in held.remedy
    held, status = finding(folder(lock=lock(), config=b"{}"))
    assert status is Status.violated and "config.json is not the one" in held.evidence[0]


def test_what_the_engine_or_the_hubs_cache_tells():
    assert finding(None, revision=COMMIT)[1] is Status.proven
    assert finding(folder(lock=lock(), config=CONFIG), revision=OTHER)[1] is Status.violated
    snapshot = f"/c/hub/models--owner--name/snapshots/{COMMIT}"
    assert finding(None, model_path=snapshot)[1] is Status.proven
    assert finding(None, model_path=snapshot.replace(COMMIT, OTHER))[1] is Status.violated


@pytest.mark.parametrize("read", [None, folder(), folder(lock=b"{"), folder(lock=lock(None), config=CONFIG)])
def test_without_evidence_it_is_unknown_and_counts(read):
    held, status = finding(read)
    assert status is Status.unknown and held.is_required and held.remedy


def test_a_deployment_declares_it(tmp_path: Path):
    data = {
        "engine": {"kind": "sglang", "venv": "/v"},
        "model": {"hub": "owner/name", "revision": COMMIT, "path": "/models/kimi"},
        "drafter": {"hub": "owner/drafter", "revision": OTHER, "path": "/models/drafter"},
        "speculation": {"algorithm": "dflash", "block_size": 8},
        "runtime": {"memory_fraction": 0.5, "dtype": "bfloat16", "attention_backend": "triton"},
        "service": {"name": "x", "port": 8000},
    }
    declared = from_deployment(to_deployment(data, folder=tmp_path), "x.toml").settings
    assert (declared["model_revision"], declared["drafter_revision"]) == (COMMIT, OTHER)
    assert (declared["memory_fraction"], declared["dtype"], declared["device"]) == (0.5, "bfloat16", "cuda")


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [("dtype", "bfloat16", "dtype"), ("memory_fraction", 0.5, "mem_fraction_static"), ("threads", 3, "dtype")],
)
def test_whatever_is_declared_and_not_told_is_an_unknown_that_counts(name, value, key):
    held = held_to(name, value, without=(key,))
    assert held.status is Status.unknown and held.is_required
    assert overall([held], is_strict=False) is Status.unknown
