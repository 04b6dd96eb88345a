"""Making SGLang and this checkout's plugin importable on a GPU machine without network."""

from __future__ import annotations

import contextlib
import fcntl
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRY_GROUP = "sglang.srt.plugins"


def site_folder(parts: Path, sites: Path, overlay: Path | None = None) -> Path:
    """An unpacked SGLang, made once however many ask for it at the same time.

    Args:
        parts: folder of the kit's parts.
        sites: folder for all of them.
        overlay: wheel of another SGLang to put in place of the kit's.
    """
    sites.mkdir(parents=True, exist_ok=True)
    with (sites / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        site = sites / "kit"
        if not site.is_dir():
            install_kit(parts, sites / "kit.part")
            (sites / "kit.part").rename(site)
        if overlay is None:
            return site
        other = sites / overlay.name.split("-cp")[0]
        if not other.is_dir():
            part = sites / "other.part"
            shutil.copytree(site, part, copy_function=os.link, dirs_exist_ok=True)
            put_over(part, overlay)
            part.rename(other)
        return other


def install_kit(parts: Path, site: Path) -> None:
    """Unpack an offline SGLang: parts of a site folder, FlashAttention, prebuilt JIT modules, headers where staged."""
    site.mkdir(parents=True, exist_ok=True)
    whole = b"".join(part.read_bytes() for part in sorted(parts.glob("site_noflash.tar.xz.*")))
    with tarfile.open(fileobj=io.BytesIO(whole), mode="r:xz") as archive:
        archive.extractall(site, filter="data")
    with lzma.open(parts / "flash_ops.abi3.so.xz") as packed, (site / "sgl_kernel/flash_ops.abi3.so").open("wb") as out:
        shutil.copyfileobj(packed, out, 1 << 24)
    if (headers := parts / "flashinfer_headers.tar.xz").is_file():
        with tarfile.open(headers) as archive:
            archive.extractall(site, filter="data")
    compile_all(site)
    cache = Path.home() / ".cache"
    cache.mkdir(exist_ok=True)
    with tarfile.open(parts / "sgl_jitcache_sm90a.tar.xz") as archive:
        archive.extractall(cache, filter="data")


def compile_all(site: Path) -> None:
    """Every server imports thousands of files: compile them once, on all cores, instead of in each process."""
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0"]
    heavy = [str(site / name) for name in ("sglang", "transformers", "flashinfer", "openai", "fastapi", "pydantic")]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([*command, *heavy], capture_output=True, timeout=40, check=False)


def put_over(site: Path, wheel: Path) -> None:
    """Another SGLang in place of the kit's, on the same dependencies."""
    for old in (site / "sglang", *site.glob("sglang-*.dist-info")):
        shutil.rmtree(old, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    compile_all(site)


def plugin_path(folder: Path) -> Path:
    """A folder whose metadata says what this checkout's pyproject says of entry points, as an installation would."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "ddtree-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtree\nVersion: 0\n")
    points = project["entry-points"][ENTRY_GROUP]
    points = points | {"benchmark_exact_ops": "exact_ops:register"}
    (info / "entry_points.txt").write_text(f"[{ENTRY_GROUP}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()))
    shutil.copy(Path(__file__).with_name("stack_sampler.py"), folder / "sitecustomize.py")
    shutil.copy(Path(__file__).with_name("exact_ops.py"), folder / "exact_ops.py")
    return folder


def environment(site: Path, plugin: Path) -> dict[str, str]:
    """Environment of a server: the kit first, then the plugin, then this checkout."""
    return os.environ | {
        "PYTHONPATH": f"{site}:{plugin}:{ROOT / 'src'}",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # other servers start on the same GPUs
        "NCCL_NVLS_ENABLE": "0",
        "TVM_FFI_CACHE_DIR": str(Path.home() / ".cache/tvm-ffi"),
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
        "DDTREE_SGLANG_CONFIG": '{"probe": false}',  # no child servers beside those of the benchmark
    }
