"""The rules of the house: which package of ours may import what.

Every import counts, at the top of a file or inside a function; only those for type checkers are left out. The rules
are tried on a made-up house too, so that a checker that sees nothing does not pass.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "ddtree"
OPERATIONS_WING = {"deploy", "verify", "doctor", "fetch", "bench", "report", "kit"}
HEAVY = {"torch", "transformers", "safetensors", "tokenizers", "triton"}
BASE = {"numpy", "typer", "rich", "pydantic", "httpx", "aiohttp", "prometheus_client"}

# What of ours a package may import. Those not named may import anything of ours.
MAY_IMPORT = {
    "tree": set(),
    "kernels": {"tree", "errors", "disk", "user_cache"},
    "models": {"kernels", "errors", "draft_temperature"},
    "engine": {"tree", "models", "kernels", "errors", "disk", "user_cache", "openmp", "draft_temperature"},
    "demo": {"errors", "user_cache"},
    "sglang": {"tree", "kernels", "errors", "disk", "user_cache", "draft_temperature"},
    "errors": {"plain_text"},
    "disk": set(),
    "draft_temperature": set(),
    "plain_text": set(),
    "openmp": set(),
    "user_cache": {"errors"},
    "extras": {"errors"},
}


def broken_rules(source: Path) -> Iterator[str]:
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source)
        package = place.parts[0].removesuffix(".py")
        for name, at_top in imports(path, "ddtree." + ".".join(place.with_suffix("").parts)):
            ours = name.split(".")[1] if name.startswith("ddtree.") else None
            outside = None if ours or name == "ddtree" else name.split(".")[0]
            if ours and ours != package and ours not in MAY_IMPORT.get(package, {ours}):
                yield f"{place} imports ddtree.{ours}"
            if name == "ddtree" and package in MAY_IMPORT:
                yield f"{place} imports ddtree as a whole"
            if package == "tree" and outside and outside not in {"numpy", *sys.stdlib_module_names}:
                yield f"{place} imports {outside}"
            if package in OPERATIONS_WING | {"demo", "cli"} and outside in HEAVY:
                yield f"{place} imports {outside}"
            if package in OPERATIONS_WING and ours in {"engine", "models", "kernels", "sglang", "train"}:
                yield f"{place} imports ddtree.{ours}, which imports torch"
            if package == "train" and ours in OPERATIONS_WING | {"cli", "demo", "server", "sglang"}:
                yield f"{place} imports ddtree.{ours}"
            if package == "cli" and at_top and ours in {"engine", "models", "kernels", "train", "server"}:
                yield f"{place} imports ddtree.{ours} before a verb asks for it"


def imports(path: Path, module: str) -> Iterator[tuple[str, bool]]:
    """Absolute names that a file imports, and whether at the top of the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {id(node) for block in ast.walk(tree) if _is_type_checking(block) for node in ast.walk(block)}
    in_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        at_top = id(node) not in in_functions
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, at_top
        elif isinstance(node, ast.ImportFrom):
            here = module.split(".") if path.name != "__init__.py" else [*module.split(".")[:-1], ""]
            base = ".".join([*here[: -node.level], *filter(None, [node.module])]) if node.level else node.module or ""
            if base == "ddtree":
                for alias in node.names:
                    yield f"ddtree.{alias.name}" if (SOURCE / alias.name).exists() else "ddtree", at_top
            else:
                yield base, at_top


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_the_house_keeps_its_rules() -> None:
    assert list(broken_rules(SOURCE)) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("tree/build.py", "import torch", "imports torch"),
        ("tree/build.py", "from ddtree.errors import UserError", "imports ddtree.errors"),
        ("tree/build.py", "import rich", "imports rich"),
        ("models/target.py", "from ddtree.bench import load", "imports ddtree.bench"),
        ("kernels/walk.py", "from ..kit import pack", "imports ddtree.kit"),
        ("engine/round.py", "def f():\n    import ddtree.deploy.unit", "imports ddtree.deploy"),
        ("bench/load.py", "def f():\n    import torch", "imports torch"),
        ("verify/probe.py", "from ddtree.engine import Engine", "which imports torch"),
        ("demo/target.py", "from ddtree import Engine", "imports ddtree as a whole"),
        ("train/run.py", "from ddtree.bench import load", "imports ddtree.bench"),
        ("cli/chat.py", "from ddtree.engine import Engine", "before a verb asks for it"),
    ],
)
def test_a_broken_rule_is_seen(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(line + "\n")
    assert any(complaint in found for found in broken_rules(tmp_path)), list(broken_rules(tmp_path))


@pytest.mark.parametrize("module", ["ddtree", "ddtree.cli.main", "ddtree.demo", "ddtree.tree"])
def test_light_modules_leave_torch_alone(module: str) -> None:
    code = f"import sys, {module}; print(sorted({HEAVY!r} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_base_installation_suffices_for_the_command() -> None:
    """Nothing beyond the base dependencies is imported for `ddtree --help`, by us directly."""
    light = {"cli", "demo", "errors", "extras", "__main__", "__init__"}
    outside = {
        name.split(".")[0]
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0].removesuffix(".py") in light
        for name, at_top in imports(path, "ddtree.x")
        if at_top
    }
    assert outside - set(sys.stdlib_module_names) - {"ddtree"} <= BASE
