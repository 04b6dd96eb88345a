"""SGLang's released sources for tests, from its wheels: fetched once into the user's cache, never installed."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

from ddtree.user_cache import cache_folder

VERSIONS = ("0.5.16", "0.5.17", "0.5.18", "0.5.23")

SUPPORT = (
    "transformers==5.12.1", "tokenizers==0.22.2", "huggingface_hub==1.33.0", "dill==0.4.1", "msgspec==0.23.0",
    "orjson==3.13.0", "pybase64==1.5.1", "pyzmq==27.3.0", "fastapi==0.121.3", "starlette==0.49.3", "openai==2.6.1",
    "setproctitle==1.3.8", "psutil", "gguf==0.19.0", "distro==1.9.0", "partial-json-parser==0.2.1.1.post7",
    "python-multipart==0.0.34", "sniffio==1.3.1", "loguru==0.7.3", "requests", "compressed-tensors==0.20.1",
    "einops", "jsonschema==4.26.0", "referencing", "rpds-py", "jsonschema-specifications==2025.9.1", "attrs",
)  # fmt: skip
"""What SGLang's argument resolution imports for real; the rest of its needs has stand-ins (`sglang_stand_ins`)."""


@cache
def sglang_source(version: str) -> Path:
    """The folder that holds the package ``sglang`` of a release; skips, saying why, where it cannot be fetched."""
    home = cache_folder() / "sglang-sources" / version
    if not home.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            _pip(
                "download", "--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp",
                "--abi=cp312", "--platform=manylinux_2_34_x86_64", f"--dest={folder}", f"sglang=={version}",
            )  # fmt: skip
            wheel = next(Path(folder).glob("*.whl"))
            part = home.with_name(f"{version}.{os.getpid()}.part")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(part, [n for n in archive.namelist() if not n.endswith(".so")])
            _settle(part, home)
    return home


@cache
def support_packages() -> Path:
    """A folder with the packages of `SUPPORT`, for this Python."""
    home = cache_folder() / "sglang-sources" / f"support-{sys.version_info[0]}{sys.version_info[1]}"
    if not home.is_dir():
        part = home.with_name(f"{home.name}.{os.getpid()}.part")
        _pip("install", "--no-deps", "--no-compile", f"--target={part}", *SUPPORT)
        _settle(part, home)
    return home


def _settle(part: Path, home: Path) -> None:
    try:
        part.rename(home)
    except OSError:  # another process was first
        shutil.rmtree(part)


def _pip(*arguments: str) -> None:
    home = cache_folder() / "sglang-sources"
    home.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "-q"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"SGLang's packages could not be fetched: {done.stderr.strip().splitlines()[-1:]}")
