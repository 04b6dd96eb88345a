"""A folder that stands for an installation on a GPU machine without network: SGLang, this checkout, a pair, prompts.

Everything lies at names that say nothing of the machine, since they come to stand in results, pages and kits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "sglang_h200"))

import kit

ROOT = Path(__file__).resolve().parents[1]
EDITED = "sglang/srt/entrypoints/http_server.py"
EDIT = b"\n# An edit in place, as they happen on machines that ran for weeks: a kit must find it.\n"
# What programs need of the caller's environment; the rest would only come to stand in kits.
_KEPT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "OMP_", "CUDA_", "NVIDIA_", "NCCL_", "NVSHMEM_", "TORCH_")
_SGLANGS = ("SGLANG_", "DDTREE_SGLANG_", "HF_HUB_", "TRANSFORMERS_", "TVM_FFI_", "TORCHDYNAMO_", "NCCL_NVLS_")


@dataclass(frozen=True)
class Home:
    """Where everything is, below ``root``.

    Attributes:
        packages: what ddtree needs and the machine lacks.
        sglang: SGLang as released; the plugin's metadata are in ``plugin``.
        edited: the same with one file edited in place.
    """

    root: Path

    packages = property(lambda self: self.root / "packages")
    sglang = property(lambda self: self.root / "sglang")
    edited = property(lambda self: self.root / "sglang-edited")
    plugin = property(lambda self: self.root / "plugin")
    source = property(lambda self: self.root / "ddtree")
    target = property(lambda self: self.root / "models" / "smollm2-135m-instruct")
    drafter = property(lambda self: self.root / "models" / "smollm2-135m-dflash")
    prompts = property(lambda self: self.root / "prompts")

    def prepare(self, stage: Path) -> None:
        """Fill it from ``stage``: ``wheels/``, ``target/``, ``prompts/`` and, where SGLang is wanted, ``kit/``."""
        self.root.mkdir(parents=True, exist_ok=True)
        wheels = sorted((stage / "wheels").glob("*.whl"))
        if wheels and not self.packages.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
            subprocess.run([*pip, "--target", str(self.packages), *map(str, wheels)], check=True)
        shutil.copytree(
            ROOT / "src" / "ddtree", self.source / "ddtree", ignore=shutil.ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )  # fmt: skip
        for name, place in (("target", self.target), ("prompts", self.prompts)):
            shutil.copytree(stage / name, place, dirs_exist_ok=True)
        shutil.copytree(ROOT / "src" / "ddtree" / "demo" / "drafter", self.drafter, dirs_exist_ok=True)
        if (stage / "kit").is_dir() and not self.edited.exists():
            kit.install_kit(stage / "kit", self.sglang)
            self._declare_plugin()
            shutil.copytree(self.sglang, self.edited, copy_function=os.link)
            file = self.edited / EDITED
            content = file.read_bytes()
            file.unlink()  # a link to the released one
            file.write_bytes(content + EDIT)

    def _declare_plugin(self) -> None:
        """Metadata as an installed ddtree has them: SGLang finds plugins by their entry points."""
        sys.path.insert(0, str(ROOT / "src"))
        import ddtree

        folder = self.plugin / f"ddtree-{ddtree.__version__}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ddtree\nVersion: {ddtree.__version__}\n")
        (folder / "entry_points.txt").write_text("[sglang.srt.plugins]\nddtree = ddtree.sglang.plugin:register\n")

    def sglang_variables(self, site: Path | None = None) -> dict[str, str]:
        """Of a SGLang server, on top of :meth:`environment`.

        Args:
            site: the SGLang to run; as released if left out.
        """
        told = kit.environment(site or self.sglang, self.plugin)
        ours = {name: value for name, value in told.items() if name.startswith(_SGLANGS)}
        return ours | {"PYTHONPATH": f"{site or self.sglang}:{self.plugin}:{self.source}"}

    def environment(self) -> dict[str, str]:
        """Of ddtree's commands and of all that they start."""
        kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
        return kept | {
            "PYTHONPATH": f"{self.packages}:{self.source}",
            "PYTHONUNBUFFERED": "1",
            "XDG_STATE_HOME": str(self.root / "state"),
            "DDTREE_CACHE": str(self.root / "cache"),
        }
