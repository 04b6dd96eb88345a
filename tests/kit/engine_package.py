"""An engine as a released wheel, an installation of it, and how somebody edited that."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import zipfile
from pathlib import Path

from ddtree.deploy.local_host import LocalHost
from ddtree.kit.engine_files import Interpreter, interpreter_of

FILES = {
    "sglang/__init__.py": b'__version__ = "0.5.17"\n',
    "sglang/srt/worker.py": b"def run():\n    return 1\n" * 40,
    "sglang/srt/graph.py": b"GRAPHS = True\n",
    "sglang/srt/no_newline.py": b"LAST = 1",
    "sglang/srt/old.py": b"OLD = 1\n",
    "sglang/srt/table.bin": bytes(range(256)) * 4,
    "sglang/srt/N=1,device=H200.json": b"{}\n",  # SGLang 0.5.17 has such names, unquoted in its RECORD
}
EDITED = {
    "sglang/srt/worker.py": FILES["sglang/srt/worker.py"].replace(b"return 1", b"return 2", 3),
    "sglang/srt/graph.py": b"GRAPHS = False  # crashed for budgets above 8\r\n",
    "sglang/srt/no_newline.py": b"LAST = 2",
}
ADDED = {"sglang/srt/tree new.py": "TREE = 'ä'\n".encode()}
DELETED = ["sglang/srt/old.py"]


def make_wheel(folder: Path) -> Path:
    """A wheel as a release has it."""
    wheel = folder / "sglang-0.5.17-py3-none-any.whl"
    info = "sglang-0.5.17.dist-info"
    files = FILES | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.17\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        lines.append(f"{name},sha256={digest},{len(content)}\n")
    files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


def site(venv: Path) -> Path:
    return next(venv.glob("lib/python*/site-packages"))


def copy(venv: Path, place: Path) -> Path:
    """Another one like it."""
    subprocess.run(["cp", "-a", str(venv), str(place)], check=True)
    return place


def edit(venv: Path) -> None:
    for name, content in (EDITED | ADDED).items():
        (site(venv) / name).write_bytes(content)
    for name in DELETED:
        (site(venv) / name).unlink()
    (site(venv) / "sglang/srt/__pycache__").mkdir(exist_ok=True)
    (site(venv) / "sglang/srt/__pycache__/x.cpython-311.pyc").write_bytes(b"not a patch")


def python(venv: Path) -> Interpreter:
    found = interpreter_of(LocalHost("none"), (), {}, str(venv))
    assert found is not None
    return found


def engine_files(venv: Path) -> dict[str, bytes]:
    root = site(venv) / "sglang"
    return {
        path.relative_to(site(venv)).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
